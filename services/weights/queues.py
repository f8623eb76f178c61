"""The small boundary to a device's ordered queues (CUDA's streams): what the weight channel does on a GPU goes through
it, so that its order can be played through without one (`tests/weights/queue_simulator.py`).

Training has the device's default queue. A publish has one of its own: it waits for training once, at an event that
training has left behind its optimizer step, and training never waits for it on the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class Event(Protocol):
    """A place in a queue."""

    def query(self) -> bool:
        """Everything before it is done."""

    def synchronize(self) -> None:
        """Waits on the host until it is."""


class Queue(Protocol):
    """What runs in order on a device."""

    handle: int
    """CUDA's ``cudaStream_t``."""

    def after(self, event: Event) -> None:
        """What follows comes after ``event``, which may lie in another queue."""

    def mark(self) -> Event:
        """The place behind everything so far."""

    def running(self) -> AbstractContextManager[None]:
        """A context: torch's operations inside go into this queue."""


class CudaQueue:
    """A ``stream``; where none is given, one of high priority: its few blocks get their turn beside training's."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._stream = stream or torch.cuda.Stream(device, priority=-1)
        self.handle: int = self._stream.cuda_stream

    def after(self, event: Event) -> None:
        """See `Queue`."""
        assert isinstance(event, torch.cuda.Event)
        self._stream.wait_event(event)

    def mark(self) -> Event:
        """See `Queue`."""
        return self._stream.record_event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """See `Queue`."""
        with torch.cuda.stream(self._stream):
            yield


class _Now:
    """An event of a device that does everything at once."""

    def query(self) -> bool:
        """See `Event`."""
        return True

    def synchronize(self) -> None:
        """See `Event`."""


class HostQueue:
    """A CPU's: everything is done when the call returns."""

    handle = 0

    def after(self, event: Event) -> None:
        """See `Queue`."""

    def mark(self) -> Event:
        """See `Queue`."""
        return _Now()

    @contextmanager
    def running(self) -> Iterator[None]:
        """See `Queue`."""
        yield


def make_queue(device: torch.device) -> Queue:
    """A queue of its own on ``device``."""
    return CudaQueue(device) if device.type == "cuda" else HostQueue()


_spare: dict[torch.device, list[Queue]] = defaultdict(list)


def borrow_queue(device: torch.device) -> Queue:
    """A queue on ``device`` that nobody else has meanwhile. torch has 32 streams of a kind and then deals them out
    again, also those that FSDP gathers in: so few are made, and used again once they are given back."""
    try:
        return _spare[device].pop()
    except IndexError:  # not looked for before: another thread might take the last one in between
        return make_queue(device)


def give_back(device: torch.device, queue: Queue) -> None:
    """It has nothing to do, and may be lent again; one in which something hangs never is."""
    _spare[device].append(queue)


def use_device(device: torch.device) -> None:
    """To be called first by a thread that works on ``device``: CUDA's current GPU is each thread's own, GPU 0 at first,
    and NCCL, registered memory and events go by it."""
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)


def current_queue(device: torch.device) -> Queue:
    """The one that the calling thread puts its work into: training's own, unless it is inside of `Queue.running`."""
    return CudaQueue(device, torch.cuda.current_stream(device)) if device.type == "cuda" else HostQueue()
