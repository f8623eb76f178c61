"""Which part of each bucket a rank of the trainer sends: rows of every weight. Known to both sides."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.protocols.cut import Cut
from penstock.protocols.versions import Layout
from penstock.services.modeling.dtypes import DTYPES


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of elements of one weight that lies in one bucket and belongs to one rank."""

    weight: int
    """Its number in the layout."""
    first: int
    """First element within the rows that the rank sends of the weight."""
    count: int
    start: int
    """Bytes from the bucket's start."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes of a bucket that follow each other, and belong to one rank."""

    start: int
    nbytes: int


def pieces_of(layout: Layout, rank: int, cut: Cut) -> list[list[Piece]]:
    """Each bucket's pieces of ``rank``."""
    pieces: list[list[Piece]] = [[] for _ in layout.spans]
    for number, weight in enumerate(layout.weights):
        itemsize = DTYPES[weight.dtype].itemsize
        elements = weight.nbytes // itemsize
        first, count = 0, elements
        if cut.ranks > 1:
            every = (*weight.shape, 1)[0]
            row, rows = cut.rows(number, every, rank)
            width = elements // max(1, every)
            first, count = row * width, rows * width
        begin, end = weight.offset + first * itemsize, weight.offset + (first + count) * itemsize
        at = begin
        while at < end:
            index = at // layout.bucket_bytes
            stop = min(end, (index + 1) * layout.bucket_bytes)
            start = at % layout.bucket_bytes
            pieces[index].append(Piece(number, (at - begin) // itemsize, (stop - at) // itemsize, start, stop - at))
            at = stop
    return pieces


def runs_of(layout: Layout, cut: Cut) -> list[list[list[Run]]]:
    """For each bucket and each rank: its bytes, in as few runs as there are. One rank has all of them, the
    padding between two weights included. Found once: with many ranks it takes seconds."""
    found = _known.get((layout.digest, cut))
    if found is None:
        found = _runs_of(layout, cut)
        _known.clear()
        _known[layout.digest, cut] = found
    return found


_known: dict[tuple[str, Cut], list[list[list[Run]]]] = {}
"""Of the last layout that was asked for."""


def _runs_of(layout: Layout, cut: Cut) -> list[list[list[Run]]]:
    size = cut.ranks
    if size == 1:
        return [[[Run(0, end - start)]] for start, end in layout.spans]
    by_rank = [pieces_of(layout, rank, cut) for rank in range(size)]
    return [[_joined(by_rank[rank][index]) for rank in range(size)] for index in range(len(layout.spans))]


def _joined(pieces: list[Piece]) -> list[Run]:
    runs: list[Run] = []
    for piece in pieces:
        if runs and runs[-1].start + runs[-1].nbytes == piece.start:
            runs[-1] = Run(runs[-1].start, runs[-1].nbytes + piece.nbytes)
        else:
            runs.append(Run(piece.start, piece.nbytes))
    return runs


def packed(bucket: torch.Tensor, runs: list[Run]) -> torch.Tensor:
    """A rank's bytes of a bucket; a view where they follow each other."""
    parts = [bucket[run.start : run.start + run.nbytes] for run in runs]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else bucket[:0]


def unpack(rows: torch.Tensor, bucket: torch.Tensor, runs: list[Run]) -> None:
    """The inverse of `packed`."""
    at = 0
    for run in runs:
        bucket[run.start : run.start + run.nbytes].copy_(rows[at : at + run.nbytes])
        at += run.nbytes
