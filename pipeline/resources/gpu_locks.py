"""GPUs of its own for each container of a machine: taken by a lock that ends with the process.

Containers that are scaled all see the same GPUs; whoever starts takes what nobody has taken. Where all are taken, they
are shared, the least taken first.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

import structlog

from penstock.services.runtime.errors import SetupError

log = structlog.get_logger()

VARIABLE = "PENSTOCK_CLAIM_GPUS"
"""A folder that all containers share, such as a tmpfs."""
SHARERS = 8
"""So many may share a GPU."""

_held: list[IO[bytes]] = []
"""Open as long as this process lives."""


def claim(folder: Path, gpus: list[str], count: int, kind: str = "") -> list[str]:
    """``count`` of ``gpus`` (as CUDA_VISIBLE_DEVICES names them), that no other process of this ``kind`` has.
    Raises `SetupError` where there are not so many."""
    if count > len(gpus):
        raise SetupError(
            f"trainer.ranks, rollout.engine.vllm.tensor_parallel_size, or a scorer's gpus: {count} GPUs are wanted for "
            f"one process, or group of them, and there are {len(gpus)} here"
        )
    taken: list[str] = []
    for turn in range(SHARERS):
        for gpu in gpus:
            if len(taken) < count and gpu not in taken and _lock(folder / f"penstock-gpu{kind}-{gpu}-{turn}"):
                taken.append(gpu)
                if turn:
                    log.warning("every GPU is taken: sharing one", gpu=gpu, sharers=turn + 1)
    return taken


def asked() -> bool:
    """The environment asks for it."""
    return bool(os.environ.get(VARIABLE))


def claim_for_this_process(gpus: list[str], count: int, kind: str = "") -> None:
    """Sets CUDA_VISIBLE_DEVICES."""
    if gpus and count:
        mine = claim(Path(os.environ[VARIABLE]), gpus, count, kind)
        log.info("took GPUs", gpus=mine, of=gpus)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)


def _lock(path: Path) -> bool:
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return False
    _held.append(file)
    return True
