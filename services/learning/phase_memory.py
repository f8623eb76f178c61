"""What a learner's process holds at most in each phase of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from penstock.services.runtime.gpus import GIB


class PhaseMemory:
    """Of one rank: what torch has allocated on its GPU; on a CPU the process's resident memory when the phase ends."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._process = device, psutil.Process()
        self._peaks: dict[str, float] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Around a phase, or a part of one; ``name`` is that of its metric."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        yield
        here = self._device.type == "cuda"
        held = torch.cuda.max_memory_allocated(self._device) if here else self._process.memory_info().rss
        self._peaks[name] = max(self._peaks.get(name, 0.0), held / GIB)

    def metrics(self) -> dict[str, float]:
        """GiB of each phase since it was asked last, by its metric."""
        found, self._peaks = self._peaks, {}
        return found
