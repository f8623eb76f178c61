"""Versions as they lie on the trainer's GPU for engines that share it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from penstock.protocols.versions import CudaIpcRoute
from penstock.services.runtime.gpus import ALLOCATOR, GROWS
from penstock.services.weights.queues import Queue
from penstock.services.weights.transports import cuda_ipc


class GpuCopies:
    """Buffers of ``nbytes`` that are shared once and used again: what CUDA has shared with another process it gives
    back only when that one says so, and one that dies never does."""

    def __init__(self, nbytes: int, device: torch.device, queue: Queue) -> None:
        self._nbytes, self._device, self._queue = nbytes, device, queue
        self._routes: list[tuple[torch.Tensor, CudaIpcRoute]] = []

    def take(self, keep: Collection[int]) -> tuple[torch.Tensor, CudaIpcRoute]:
        """One to fill (uint8 ``[nbytes]``) that is none of ``keep``, which are addresses; and how it is mapped."""
        for buffer, route in self._routes:
            if buffer.data_ptr() not in keep:
                return buffer, route
        with self._queue.running(), _for_others():  # of its memory: training may still read what it has freed
            buffer = torch.zeros(self._nbytes, dtype=torch.uint8, device=self._device)
        self._queue.mark().synchronize()
        self._routes.append((buffer, cuda_ipc.share(buffer)))
        return self._routes[-1]


@contextmanager
def _for_others() -> Iterator[None]:
    """Memory that is made inside can be mapped: a segment that grows (`serve.environment`) cannot."""
    told = next((os.environ[name] for name in ALLOCATOR if os.environ.get(name)), "")
    grows = GROWS in told and torch.cuda.is_available()
    if grows:  # all that is told at once: what is left out would be as if it had never been told
        torch.cuda.memory._set_allocator_settings(told.replace(GROWS, GROWS.replace("True", "False")))
    try:
        yield
    finally:
        if grows:
            torch.cuda.memory._set_allocator_settings(told)
