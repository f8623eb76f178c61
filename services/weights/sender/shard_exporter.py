"""The trainer's weights as the buckets of a version: cast, and written where they are sent from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from penstock.protocols.cut import Cut
from penstock.protocols.digests import Gmac
from penstock.protocols.versions import digests_of
from penstock.services.modeling.dtypes import DTYPES
from penstock.services.modeling.parallel.fsdp import first_row, local
from penstock.services.modeling.parallel.gathered import Gathered
from penstock.services.modeling.parallel.world import World
from penstock.services.weights.byte_views import as_memory, copy_bytes
from penstock.services.weights.layout import make_layout
from penstock.services.weights.parts import Piece, pieces_of

CACHED_BYTES = 1 << 19
"""What a core's cache still holds when it is read again: so many bytes are written, then hashed."""


class ShardExporter:
    """``named`` parameters, which may be cut over ``world``, as they are whenever they are asked for, sent as
    ``dtype``; and buffers, sent as they are. ``loaded_bytes``: what engines load of a version, where that is more than
    is sent. All ranks make theirs at once."""

    def __init__(
        self,
        named: Mapping[str, torch.Tensor | Gathered],
        dtype: str,
        bucket_bytes: int,
        world: World,
        gmac: Gmac,
        loaded_bytes: int = 0,
    ) -> None:
        self.world, self.gmac = world, gmac
        every = world.of_stages({name: _about(p, world.stage) for name, p in named.items()})
        every = dict(sorted(every.items(), key=lambda item: bool(item[1]["dtype"])))  # buffers last, of all stages
        shapes = {name: tuple(about["shape"]) for name, about in every.items()}
        own = {name: about["dtype"] for name, about in every.items() if about["dtype"]}
        self.layout = make_layout(shapes, dtype, bucket_bytes, own)
        self.loaded_bytes = max(self.layout.nbytes, loaded_bytes)
        self._dtypes = [DTYPES[weight.dtype] for weight in self.layout.weights]
        self._weights = [named.get(weight.name) for weight in self.layout.weights]
        self.device = next(iter(named.values())).device
        """Of the model."""
        about = [every[weight.name] for weight in self.layout.weights]
        self.cut = Cut(
            replicas=world.shape.replicas, shards=world.shards, tensor=world.shape.tensor,
            blocks=tuple(number for number, of in enumerate(about) if of["tensor"]),
            experts=world.shape.expert, dealt=tuple(number for number, of in enumerate(about) if of["expert"]),
            stages=world.shape.stages,
            placed=tuple(of["stage"] for of in about) if world.shape.stages > 1 else (),
        )  # fmt: skip
        self.pieces = pieces_of(self.layout, world.rank, self.cut)
        rows = enumerate((*weight.shape, 1)[0] for weight in self.layout.weights)
        self._rows = [self.cut.rows(number, count, world.rank) for number, count in rows]
        """First row and number of rows that this rank sends, of each weight."""

    def buckets(self, buffer: torch.Tensor, hashed: bool = False) -> Iterator[tuple[int, str | None]]:
        """For a world of one on a CPU: writes bucket after bucket to its place in ``buffer`` (uint8 ``[bytes]``), and
        yields its number, and with ``hashed`` its digest, made while writing."""
        parts, put = _Parts(self._weights, self._rows), self.putter()
        for index, (start, end) in enumerate(self.layout.spans):
            digest = self._write_hashed(parts, index, buffer[start:end]) if hashed else None
            if not hashed:
                self._write_bucket(put, index, buffer)
            yield index, digest

    def write(self, buffer: torch.Tensor) -> None:
        """Writes this rank's part of every bucket to its place in ``buffer`` (uint8 ``[bytes]`` on the host)."""
        put = self.putter()
        for index in range(len(self.layout.spans)):
            self._write_bucket(put, index, buffer)

    def putter(self) -> Callable[[Piece, torch.Tensor, int], None]:
        """What writes a piece, cast, to a target (uint8 ``[bytes]``) from a byte of it on."""
        parts = _Parts(self._weights, self._rows)
        return lambda piece, target, start: _put(
            self._elements(parts, piece), self._dtypes[piece.weight], target, start
        )

    def digest(self) -> str:
        """Of the version that the weights make as they are now; for a world of one."""
        buffer = torch.zeros(self.layout.nbytes, dtype=torch.uint8)
        self.write(buffer)
        return digests_of(self.layout, as_memory(buffer), self.gmac).whole

    def _write_bucket(self, put: Callable[[Piece, torch.Tensor, int], None], index: int, buffer: torch.Tensor) -> None:
        start, end = self.layout.spans[index]
        for piece in self.pieces[index]:
            put(piece, buffer[start:end], piece.start)

    def _write_hashed(self, parts: _Parts, index: int, target: torch.Tensor) -> str:
        hasher, written, hashed = self.gmac.hasher(), target.numpy(), 0
        for piece in self.pieces[index]:
            elements, end = self._elements(parts, piece), piece.start
            dtype = self._dtypes[piece.weight]
            cast = elements.dtype != dtype
            source: Any = elements if cast else elements.view(torch.uint8).numpy()  # views of numpy's cost far less
            size = dtype.itemsize if cast else 1
            for first in range(0, len(source), CACHED_BYTES // size):
                block = source[first : first + CACHED_BYTES // size]
                start, end = end, end + len(block) * size
                if cast:
                    _put(block, dtype, target, start)
                else:
                    np.copyto(written[start:end], block)
                hasher.update(written[hashed:end])  # with the padding before it
                hashed = end
        hasher.update(written[hashed:])
        return hasher.hexdigest()

    def _elements(self, parts: _Parts, piece: Piece) -> torch.Tensor:
        return parts.of(piece.weight)[piece.first : piece.first + piece.count]


def _put(elements: torch.Tensor, dtype: torch.dtype, target: torch.Tensor, start: int) -> None:
    """Writes them, cast, to ``target`` from byte ``start`` on."""
    place = target[start : start + elements.numel() * dtype.itemsize]
    if elements.dtype == dtype:
        copy_bytes(elements.view(torch.uint8), place)
    else:
        place.view(dtype).copy_(elements)


class _Parts:
    """The ``rows`` of each weight that this rank sends, flat. What has to be made is so when its turn comes, and kept
    until the next one's: pieces come weight after weight."""

    def __init__(self, weights: Sequence[torch.Tensor | Gathered | None], rows: Sequence[tuple[int, int]]) -> None:
        self._weights, self._rows = weights, rows
        self._views = [
            _sent(weight, *of) if isinstance(weight, torch.Tensor) else None
            for weight, of in zip(weights, rows, strict=True)
        ]
        self._last: tuple[int, torch.Tensor] | None = None

    def of(self, number: int) -> torch.Tensor:
        """Of the weight with this ``number``."""
        view = self._views[number]
        if view is not None:
            return view
        if self._last is None or self._last[0] != number:
            weight = self._weights[number]
            assert weight is not None, "another stage sends it"
            self._last = number, _sent(weight, *self._rows[number])
        return self._last[1]


def _sent(weight: torch.Tensor | Gathered, first: int, count: int) -> torch.Tensor:
    """These rows, flat."""
    width = math.prod(weight.shape[1:])
    if isinstance(weight, torch.Tensor):
        begun, mine = first_row(weight), local(weight)
    else:
        begun, mine = weight.first, weight.local()
    return mine[(first - begun) * width : (first - begun + count) * width]


def _about(weight: torch.Tensor | Gathered, stage: int) -> dict[str, Any]:
    cut = {name: _cuts_rows(name, weight) for name in ("tensor", "expert")}
    own = str(weight.dtype).removeprefix("torch.") if isinstance(weight, torch.nn.Buffer) else ""
    return {"shape": list(weight.shape), "dtype": own, "stage": stage, **cut}


def _cuts_rows(name: str, weight: torch.Tensor | Gathered) -> bool:
    """The ranks of this dimension of the mesh cut its rows, before FSDP does."""
    if not isinstance(weight, DTensor):
        return False
    how = dict(zip(weight.device_mesh.mesh_dim_names or (), weight.placements, strict=False))
    return name in how and how[name].is_shard(0)
