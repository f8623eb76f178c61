"""A version's bytes on the GPU that trains: what a rank holds of them, cast, in memory of their own.

The model is read into it in one go, on a queue of the publish's own; from then on the model may change, whatever
becomes of the broadcast. It takes as much memory as the rank's part of the version (2 bytes a parameter in 16 bits).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.protocols.digests import BLOCK, Gmac
from penstock.protocols.versions import Layout
from penstock.services.weights.gpu_digest import GpuGmac
from penstock.services.weights.parts import Piece, Run
from penstock.services.weights.queues import Event, Queue


class DeviceStage:
    """``pieces`` and ``runs`` are this rank's, of each bucket; with one run for each whole bucket where it is alone."""

    def __init__(
        self, layout: Layout, pieces: list[list[Piece]], runs: list[list[Run]], device: torch.device, queue: Queue,
        gmac: Gmac,
    ) -> None:  # fmt: skip
        self._layout, self._pieces, self._runs, self._gmac = layout, pieces, runs, gmac
        self.queue = queue
        """The publish's own."""
        self._digests = GpuGmac(gmac, device)
        sizes = [sum(run.nbytes for run in mine) for mine in runs]
        self._starts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
        with queue.running():
            self.bytes = torch.zeros(self._starts[-1], dtype=torch.uint8, device=device)
            """uint8 ``[bytes of this rank]``, bucket after bucket."""

    def read(self, put: Callable[[Piece, torch.Tensor, int], None], trained: Event) -> Event:
        """Has ``put(piece, target, byte)`` write every piece, cast, behind ``trained``. Returns once the model was
        read: it may change; with the event after which all is here."""
        self.queue.after(trained)
        with self.queue.running():
            for index, pieces in enumerate(self._pieces):
                bucket, runs = self.bucket(index), self._runs[index]
                for piece in pieces:
                    put(piece, bucket, _place(piece, runs))
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
            for index, (begin, _) in enumerate(self._layout.spans):
                at, mine = begin, self.bucket(index)
                taken = 0
                for run in self._runs[index]:
                    place = buffer[at + run.start : at + run.start + run.nbytes]
                    place.copy_(mine[taken : taken + run.nbytes], non_blocking=True)
                    taken += run.nbytes
        return self.queue.mark()

    def part(self, index: int) -> int:
        """What these bytes add to their bucket's digest."""
        begin, end = self._layout.spans[index]
        blocks, total, taken, mine = -(-(end - begin) // BLOCK), 0, 0, self.bucket(index)
        with self.queue.running():
            for run in self._runs[index]:
                first, last = run.start // BLOCK, -(-(run.start + run.nbytes) // BLOCK)
                data = mine[taken : taken + run.nbytes]
                if before := run.start - BLOCK * first:  # others' bytes beside it count as zeros here
                    data = torch.cat((data.new_zeros(before), data))
                total ^= self._digests.part(data, blocks - last)
                taken += run.nbytes
        return total


def _place(piece: Piece, runs: list[Run]) -> int:
    """Where in the rank's packed bytes of its bucket a piece lies."""
    taken = 0
    for run in runs:
        if run.start <= piece.start < run.start + run.nbytes:
            return taken + piece.start - run.start
        taken += run.nbytes
    raise AssertionError("a piece lies in no run")
