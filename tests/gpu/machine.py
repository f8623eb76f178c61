"""Where the tests run: on GPUs, or as a rehearsal on the CPU: gloo stands for NCCL there, shared memory for CUDA IPC.

A rehearsal (`pytest -m gpu --rehearse tests/gpu`) proves that the tests themselves work, so that the first person with
a GPU meets Penstock's mistakes and not theirs.
"""

from __future__ import annotations

import torch

from penstock.services.runtime.gpus import visible_gpus

GIB = float(1 << 30)
STANDS_FOR = {"nccl": "gloo", "cuda_ipc": "shm"}


class Machine:
    """``rehearsed``: on the CPU."""

    def __init__(self, rehearsed: bool) -> None:
        self.rehearsed = rehearsed
        self.device = torch.device("cpu") if rehearsed else torch.device("cuda", 0)

    def transport(self, name: str) -> str:
        """The transport, or what stands for it here."""
        return STANDS_FOR[name] if self.rehearsed else name

    def first(self) -> str:
        """The first of the GPUs that are to be seen, as `CUDA_VISIBLE_DEVICES` names it."""
        return visible_gpus()[0]

    def settle(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def forget_peak(self) -> None:
        """What `peak_gib` counts begins here."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_gib(self) -> float:
        """What the allocator had at most, what it lost between blocks included; 0 in a rehearsal."""
        return 0.0 if self.rehearsed else torch.cuda.max_memory_reserved(self.device) / GIB
