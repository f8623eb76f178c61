"""A learner's ranks as processes of torchrun, on this machine."""

from __future__ import annotations

import os
import sys

from penstock.services.runtime.errors import EXIT_SETUP, SetupError
from penstock.services.runtime.processes import die_with_parent

_OURS = "PENSTOCK_RANK"


def launched() -> bool:
    """This process is a rank already, of our torchrun or of the user's own."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def mine() -> int:
    """This process's rank; 0 outside torchrun."""
    return int(os.environ.get("RANK", "0"))


def join(kind: str, count: int) -> None:
    """This process is one of the ``count`` ranks of the learner ``kind``, or alone. Raises `SetupError` where torchrun
    has started another number; one that our own torchrun started dies with it, whatever state it is in (Linux)."""
    found = int(os.environ.get("WORLD_SIZE", "1"))
    if count > 1 and found != count:
        raise SetupError(f"{kind}.ranks: {count}, but torchrun has started {found}; make them equal")
    if os.environ.get(_OURS):
        die_with_parent()


def launch(count: int, grace_s: int) -> int:
    """Runs this very command as ``count`` ranks; returns the exit code of the rank that failed first, or 0; that of one
    which must not be started again goes before. Where one dies, torchrun ends the others. SIGTERM is handed on to them,
    and they have ``grace_s`` to leave."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,  # the supervisor starts all of it again
        monitor_interval=0.5,
        shutdown_timeout=grace_s,
    )
    os.environ[_OURS] = "1"
    command = [sys.executable, "-m", "penstock.pipeline.cli", *sys.argv[1:]]
    try:
        elastic_launch(config, command[0])(*command[1:])
    except SignalException:
        return 0  # we were told to end
    except ChildFailedError as error:
        if any(failure.exitcode == EXIT_SETUP for failure in error.failures.values()):
            return EXIT_SETUP
        first = min(error.failures.values(), key=lambda failure: failure.timestamp)
        return first.exitcode if first.exitcode > 0 else 1
    return 0
