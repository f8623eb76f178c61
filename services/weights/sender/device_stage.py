"""A version's bytes on the GPU that trains: what a rank holds of them, cast, in memory of their own, read on a queue of
the publish's own.

Where other GPUs are sent them from there, the whole version lies there: the model is read into it in one go, and from
then on may change, whatever becomes of the broadcast. It takes as much memory as the rank's part of the version (2
bytes a parameter in 16 bits). Where all go by the host (`run.placement`: colocated), one bucket does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from itertools import accumulate

import torch

from penstock.protocols.digests import BLOCK, Gmac
from penstock.protocols.versions import Layout
from penstock.services.weights.gpu_digest import GpuGmac
from penstock.services.weights.parts import Piece, Run
from penstock.services.weights.queues import Event, Queue

Put = Callable[[Piece, torch.Tensor, int], None]
"""Writes a piece, cast, to a target from a byte of it on."""


class _Stage(ABC):
    """``pieces`` and ``runs`` are this rank's, of each bucket; with one run for each whole bucket where it is alone."""

    def __init__(
        self, layout: Layout, pieces: list[list[Piece]], runs: list[list[Run]], device: torch.device, queue: Queue,
        gmac: Gmac,
    ) -> None:  # fmt: skip
        self._layout, self._pieces, self._runs = layout, pieces, runs
        self.queue = queue
        """The publish's own."""
        self._digests = GpuGmac(gmac, device)
        self._sizes = [sum(run.nbytes for run in mine) for mine in runs]
        with queue.running():
            self.bytes = torch.zeros(self._room(), dtype=torch.uint8, device=device)
            """uint8; what lies there."""

    @abstractmethod
    def _room(self) -> int:
        """Bytes that lie there at once."""

    def _put(self, put: Put, index: int, bucket: torch.Tensor) -> None:
        for piece in self._pieces[index]:
            put(piece, bucket, _place(piece, self._runs[index]))

    def _copy(self, index: int, bucket: torch.Tensor, buffer: torch.Tensor) -> None:
        """Begins to copy this rank's bytes of a bucket to their place in ``buffer``."""
        at, taken = self._layout.spans[index][0], 0
        for run in self._runs[index]:
            place = buffer[at + run.start : at + run.start + run.nbytes]
            place.copy_(bucket[taken : taken + run.nbytes], non_blocking=True)
            taken += run.nbytes

    def _digest(self, index: int, bucket: torch.Tensor) -> int:
        """What this rank's bytes of a bucket add to its digest."""
        begin, end = self._layout.spans[index]
        blocks, total, taken = -(-(end - begin) // BLOCK), 0, 0
        for run in self._runs[index]:
            first, last = run.start // BLOCK, -(-(run.start + run.nbytes) // BLOCK)
            data = bucket[taken : taken + run.nbytes]
            if before := run.start - BLOCK * first:  # others' bytes beside it count as zeros here
                data = torch.cat((data.new_zeros(before), data))
            total ^= self._digests.part(data, blocks - last)
            taken += run.nbytes
        return total


class DeviceStage(_Stage):
    """All of this rank's bytes, bucket after bucket."""

    def _room(self) -> int:
        return sum(self._sizes)

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(self._sizes)]

    def read(self, put: Put, trained: Event, target: torch.Tensor | None = None) -> Event:
        """Has ``put`` write every piece behind ``trained``. Returns once the model was read: it may change; with the
        event after which all is here. ``target`` is written by `copy_to`."""
        self.queue.after(trained)
        with self.queue.running():
            for index in range(len(self._sizes)):
                self._put(put, index, self.bucket(index))
        read = self.queue.mark()
        read.synchronize()
        return read

    def copy_whole(self, target: torch.Tensor) -> None:
        """Copies all bytes to ``target`` on the same device (uint8, as many), and waits until they are there."""
        with self.queue.running():
            target.copy_(self.bytes)
        self.queue.mark().synchronize()

    def bucket(self, index: int) -> torch.Tensor:
        """This rank's bytes of a bucket."""
        return self.bytes[self._starts[index] : self._starts[index + 1]]

    def copy_to(self, buffer: torch.Tensor) -> Event:
        """Begins to copy everything to its place in ``buffer`` (uint8 ``[bytes]`` on the host, registered)."""
        with self.queue.running():
            for index in range(len(self._sizes)):
                self._copy(index, self.bucket(index), buffer)
        return self.queue.mark()

    def part(self, index: int) -> int:
        """What these bytes add to their bucket's digest."""
        with self.queue.running():
            return self._digest(index, self.bucket(index))


class BucketStage(_Stage):
    """One bucket at a time, on its way to the host."""

    def _room(self) -> int:
        return max(self._sizes, default=0)

    def read(self, put: Put, trained: Event, target: torch.Tensor) -> Event:
        """Has ``put`` write every piece behind ``trained``, and copies it to its place in ``target`` (uint8 ``[bytes]``
        on the host). Returns once all is there: the model may change."""
        self._parts: list[int] = []
        self.queue.after(trained)
        with self.queue.running():
            for index, size in enumerate(self._sizes):
                bucket = self.bytes[:size].zero_()  # between the pieces lies nothing
                self._put(put, index, bucket)
                self._copy(index, bucket, target)
                self._parts.append(self._digest(index, bucket))
        read = self.queue.mark()
        read.synchronize()
        return read

    def copy_to(self, buffer: torch.Tensor) -> Event:
        """`read` has done so."""
        return self.queue.mark()

    def part(self, index: int) -> int:
        """What this rank's bytes of a bucket add to its digest."""
        return self._parts[index]


def _place(piece: Piece, runs: list[Run]) -> int:
    """Where in the rank's packed bytes of its bucket a piece lies."""
    taken = 0
    for run in runs:
        if run.start <= piece.start < run.start + run.nbytes:
            return taken + piece.start - run.start
        taken += run.nbytes
    raise AssertionError("a piece lies in no run")
