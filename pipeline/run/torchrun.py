"""A learner's ranks as processes of torchrun."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from penstock.pipeline.run.command import penstock
from penstock.services.runtime.address import interface_of
from penstock.services.runtime.errors import EXIT_SETUP, SetupError
from penstock.services.runtime.processes import die_with_parent

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

log = structlog.get_logger()

_OURS = "PENSTOCK_RANK"
MEET_S = 3600
"""For the other machines of a learner to come: they may wait for each other in a queue."""
EARLY, EARLY_S = 10, 60.0
"""So many meetings that break up so soon, one after the other, are no accident."""


class NotMetError(RuntimeError):
    """The other machines of a learner have not come."""


VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""By which torchrun tells a process which rank it is; Kubeflow's PyTorchJob and others set them for whatever they
start."""


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
    """Runs this very command as ``count`` ranks on this machine; returns the exit code of the rank that failed first,
    or 0; that of one which must not be started again goes before. Where one dies, torchrun ends the others. SIGTERM is
    handed on to them, and they have ``grace_s`` to leave."""
    loopback = interface_of("127.0.0.1")  # by themselves they would listen where this host's name is
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={loopback}")
    return _run(_config(count, grace_s))


def launch_spread(kind: str, nodes: int, count: int, grace_s: int, folder: Path, host: str) -> int:
    """The same with ``count`` ranks here, and as many on each of ``nodes`` machines that do the same: they meet by the
    run's ``folder``, and this one is reached at ``host``. Raises `NotMetError` where they do not come."""
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError

    from penstock.pipeline.run import rendezvous
    from penstock.pipeline.run.meeting import meeting

    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(host))
    early = 0
    while True:
        begun = time.monotonic()
        with meeting(folder, kind, host, MEET_S) as (store, secret, hosts):
            log.info("meeting the other machines", nodes=nodes, at=f"{store.host}:{store.port}", hosts=hosts)
            more = {"met": rendezvous.Met(store, secret), "join_timeout": MEET_S}
            config = _config(count, grace_s, nodes=nodes, local_addr=host, rdzv_configs=more)
            try:
                return _run(config)
            except (RendezvousError, DistError) as error:  # the one that hosts is gone: before all met, or after
                early = early + 1 if time.monotonic() - begun < EARLY_S else 0
                said = f"{type(error).__name__}: {error}"
                if early == EARLY or isinstance(error, RendezvousTimeoutError):
                    raise NotMetError(
                        f"{kind}.nodes: not all {nodes} machines have met ({said}); start penstock join FOLDER {kind} "
                        "on each"
                    ) from error
                log.warning("the other machines are gone", error=said)
        time.sleep(1)


def _config(count: int, grace_s: int, nodes: int = 1, **more: Any) -> LaunchConfig:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    from penstock.pipeline.run import rendezvous

    return LaunchConfig(
        run_id=rendezvous.NAME,
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=count,
        rdzv_backend=rendezvous.NAME,
        max_restarts=0,  # the supervisor starts all of it again
        monitor_interval=0.5,
        shutdown_timeout=grace_s,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # else an empty folder of each start stays in /tmp
        **more,
    )


def _run(config: LaunchConfig) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    os.environ[_OURS] = "1"
    command = penstock(*sys.argv[1:])
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
