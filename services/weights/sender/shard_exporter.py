"""The trainer's weights as the buckets of a version: cast, and gathered on rank 0 a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from penstock.protocols.digests import Gmac
from penstock.protocols.versions import digests_of
from penstock.services.modeling.dtypes import DTYPES
from penstock.services.modeling.parallel.fsdp import local, rows_of
from penstock.services.modeling.parallel.world import World
from penstock.services.weights.byte_views import as_memory, copy_bytes
from penstock.services.weights.layout import make_layout

CACHED_BYTES = 1 << 19
"""What a core's cache still holds when it is read again: so many bytes are written, then hashed."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run of elements of one weight that lies in one bucket and belongs to one rank."""

    weight: int
    first: int
    """First element within the rank's part."""
    count: int
    start: int
    """Bytes from the bucket's start."""


class ShardExporter:
    """``named`` parameters, which may be cut over ``world``, as they are whenever `buckets` runs.

    Besides the version's own buffer, which lies on the host of rank 0, two buckets of memory are used, whatever the
    model's size.
    """

    def __init__(
        self, named: Mapping[str, torch.Tensor], dtype: str, bucket_bytes: int, world: World, gmac: Gmac
    ) -> None:
        self._world, self.gmac = world, gmac
        self.layout = make_layout({name: tuple(p.shape) for name, p in named.items()}, dtype, bucket_bytes)
        self._dtype = DTYPES[dtype]
        self._weights = [named[weight.name] for weight in self.layout.weights]
        self.device = self._weights[0].device
        """Of the model."""
        self._pieces = [self._cut(rank) for rank in range(world.size)]
        self._on_host = self.device.type == "cpu"
        self._staging = self._two_buckets() if world.rank or not self._on_host else None
        self._arrivals = self._two_buckets() if world.size > 1 and not world.rank else None

    def buckets(
        self, buffer: torch.Tensor | None, hashed: bool = False
    ) -> Iterator[tuple[int, torch.Tensor, str | None]]:
        """Writes bucket after bucket to its place in ``buffer`` (uint8 ``[bytes]`` on the host; rank 0), and yields its
        number, its bytes on the model's device, which stay as they are until the next but one is asked for, and with
        ``hashed`` its digest, where that could be had while writing. The other ranks run it too, for what they send."""
        if self._world.rank:
            yield from self._send_all()
            return
        assert buffer is not None
        parts = [local(weight) for weight in self._weights]
        coming = self._post(0)
        in_order = self._on_host and self._world.size == 1
        for index, (start, end) in enumerate(self.layout.spans):
            following = self._post(index + 1)
            target = buffer[start:end] if self._on_host else self._stage(index)[: end - start]
            if not self._on_host:
                target.zero_()  # between two weights lies padding, which the digest covers
            digest = None
            if hashed and in_order:
                digest = self._write_hashed(parts, index, target)
            else:
                for piece in self._pieces[0][index]:
                    self._put(self._elements(parts, piece), target, piece.start)
            for rank, (work, received) in coming.items():
                work.wait()
                at = 0
                for piece in self._pieces[rank][index]:
                    nbytes = piece.count * self._dtype.itemsize
                    copy_bytes(received[at : at + nbytes], target[piece.start : piece.start + nbytes])
                    at += nbytes
            if not self._on_host:
                buffer[start:end].copy_(target)
            yield index, target, digest
            coming = following

    def digest(self) -> str:
        """Of the version that the weights make as they are now; for a world of one."""
        buffer = torch.zeros(self.layout.nbytes, dtype=torch.uint8)
        for _ in self.buckets(buffer):
            pass
        return digests_of(self.layout, as_memory(buffer), self.gmac).whole

    def _write_hashed(self, parts: list[torch.Tensor], index: int, target: torch.Tensor) -> str:
        hasher, written, hashed = self.gmac.hasher(), target.numpy(), 0
        for piece in self._pieces[0][index]:
            elements, end = self._elements(parts, piece), piece.start
            cast = elements.dtype != self._dtype
            source: Any = elements if cast else elements.view(torch.uint8).numpy()  # views of numpy's cost far less
            size = self._dtype.itemsize if cast else 1
            for first in range(0, len(source), CACHED_BYTES // size):
                block = source[first : first + CACHED_BYTES // size]
                start, end = end, end + len(block) * size
                if cast:
                    self._put(block, target, start)
                else:
                    np.copyto(written[start:end], block)
                hasher.update(written[hashed:end])  # with the padding before it
                hashed = end
        hasher.update(written[hashed:])
        return hasher.hexdigest()

    def _send_all(self) -> Iterator[tuple[int, torch.Tensor, None]]:
        parts = [local(weight) for weight in self._weights]
        sending: dict[int, Any] = {}
        for index in range(len(self.layout.spans)):
            if earlier := sending.pop(index - 2, None):
                earlier.wait()
            target, at = self._stage(index), 0
            for piece in self._pieces[self._world.rank][index]:
                self._put(self._elements(parts, piece), target, at)
                at += piece.count * self._dtype.itemsize
            if at:
                sending[index] = dist.isend(target[:at], 0, group=self._world.publish_group)
            yield index, target, None
        for work in sending.values():
            work.wait()

    def _post(self, index: int) -> dict[int, tuple[Any, torch.Tensor]]:
        """Asks the other ranks for their pieces of a bucket: they come into one staging bucket, a rank after the
        other."""
        posted: dict[int, tuple[Any, torch.Tensor]] = {}
        if self._arrivals is None or index >= len(self.layout.spans):
            return posted
        at, staging = 0, self._arrivals[index % 2]
        for rank in range(1, self._world.size):
            nbytes = sum(piece.count for piece in self._pieces[rank][index]) * self._dtype.itemsize
            if nbytes:
                part = staging[at : at + nbytes]
                posted[rank] = dist.irecv(part, rank, group=self._world.publish_group), part
                at += nbytes
        return posted

    def _two_buckets(self) -> torch.Tensor:
        return torch.zeros((2, self.layout.bucket_bytes), dtype=torch.uint8, device=self.device)

    def _stage(self, index: int) -> torch.Tensor:
        assert self._staging is not None
        return self._staging[index % 2]

    def _put(self, elements: torch.Tensor, target: torch.Tensor, start: int) -> None:
        """Writes them, cast, to ``target`` from byte ``start`` on."""
        place = target[start : start + elements.numel() * self._dtype.itemsize]
        if elements.dtype == self._dtype:
            copy_bytes(elements.view(torch.uint8), place)
        else:
            place.view(self._dtype).copy_(elements)

    def _elements(self, parts: list[torch.Tensor], piece: _Piece) -> torch.Tensor:
        return parts[piece.weight][piece.first : piece.first + piece.count]

    def _cut(self, rank: int) -> list[list[_Piece]]:
        """Each bucket's pieces of ``rank``."""
        size = self._dtype.itemsize
        pieces: list[list[_Piece]] = [[] for _ in self.layout.spans]
        for number, weight in enumerate(self.layout.weights):
            elements = weight.nbytes // size
            first, count = 0, elements
            if self._world.size > 1:
                row, rows = rows_of(weight.shape[0], rank, self._world.size)
                width = elements // weight.shape[0]
                first, count = row * width, rows * width
            begin, end = weight.offset + first * size, weight.offset + (first + count) * size
            at = begin
            while at < end:
                index = at // self.layout.bucket_bytes
                stop = min(end, (index + 1) * self.layout.bucket_bytes)
                piece = _Piece(number, (at - begin) // size, (stop - at) // size, at % self.layout.bucket_bytes)
                pieces[index].append(piece)
                at = stop
        return pieces
