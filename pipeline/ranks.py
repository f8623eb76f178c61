"""The trainer's ranks as processes of torchrun, on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def launched() -> bool:
    """This process is a rank already, of our torchrun or of the user's own."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def mine() -> int:
    """This process's rank; 0 outside torchrun."""
    return int(os.environ.get("RANK", "0"))


def launch(count: int, logs: Path) -> int:
    """Runs this very command as ``count`` ranks; returns the exit code of the rank that failed first, or 0. Where one
    dies, torchrun ends the others."""
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
    )
    command = [sys.executable, "-m", "pipeline.cli", *sys.argv[1:]]
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        first = min(error.failures.values(), key=lambda failure: failure.timestamp)
        return first.exitcode if first.exitcode > 0 else 1
    return 0
