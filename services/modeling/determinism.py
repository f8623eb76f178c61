"""``run.deterministic``: the same weights, bit by bit, from the same ledger, on the same kind of machine.

What it fixes: PyTorch's deterministic algorithms; the threads and the instruction set, recorded in the run and compared
ever after; the optimizer's implementation and the fp32 master copy, which are always the same; stored reference
log-probabilities; micro-batches that depend on the batch alone; random numbers keyed by seed, group, sample and
position; and generation and reference a group at a time, so that nothing depends on what else was in a batch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from penstock.services.runtime.errors import SetupError


class MachineError(SetupError):
    """This machine computes differently from the one that the run began on."""


def machine(threads: int) -> dict[str, str | int]:
    """What the last bit of a result depends on."""
    return {
        "threads": threads,
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def pin(folder: Path, actor: str, threads: int) -> None:
    """Makes this process deterministic. Raises `MachineError` where an ``actor`` of this run began elsewhere."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(threads)
    mine = machine(threads)
    path = folder / "machines" / f"{actor}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{actor}-{os.getpid()}")
    aside.write_text(json.dumps(mine))
    try:
        os.link(aside, path)  # the first one decides, whole or not at all
    except FileExistsError:
        recorded = json.loads(path.read_text())
        differing = [
            f"{key} {mine[key]!r}, recorded {recorded.get(key)!r}" for key in mine if mine[key] != recorded.get(key)
        ]
        if differing:
            raise MachineError(
                f"run.deterministic: this machine differs from the run's: {'; '.join(differing)}. Continue on one like "
                "it, or without run.deterministic"
            ) from None
    finally:
        aside.unlink()
