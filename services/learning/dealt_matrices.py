"""Matrices that are cut over ranks, dealt out: each comes whole to one rank, and what that makes of it goes back.

    rank 0:  its rows of A and B ─▶ all-to-all ─▶ all of A ─▶ (what is made of it) ─▶ all-to-all ─▶ its rows of both
    rank 1:  its rows of A and B ─▶ all-to-all ─▶ all of B ─▶ (what is made of it) ─▶ all-to-all ─▶ its rows of both

One round after the other, so that no rank ever holds more than a few whole matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from penstock.protocols.cut import rows_of
from penstock.services.modeling.parallel.exchange import exchange
from penstock.services.modeling.parallel.world import World

ROUND_NUMBERS = 1 << 24
"""So many numbers of small matrices come to a rank in a round; a larger matrix comes alone."""
Block = tuple[slice, slice]


@dataclass(frozen=True)
class Dealt:
    """One matrix of a round."""

    parameter: torch.nn.Parameter
    owner: int
    """Who gets it whole: a number among the ranks that it is cut over, as are all below."""
    blocks: tuple[Block, ...]
    """What each of them has of it."""
    senders: range
    """Those whose blocks make it up; the others have copies."""

    def numbers(self, member: int) -> int:
        """How many ``member`` has of it."""
        rows, columns = self.blocks[member]
        return (rows.stop - rows.start) * (columns.stop - columns.start)


class DealtMatrices:
    """Those of ``parameters``, matrices of a model that is cut as ``world`` says. Every rank calls every method, with
    the same rounds. Replicas, and a pipeline's stages, deal out each their own."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], world: World) -> None:
        self._size = world.shards * world.shape.tensor
        self._place = world.rank % self._size
        self._group: Any = world.cut_group if self._size > 1 else None
        self.rounds: list[list[Dealt]] = []
        """The dearest matrices come first, so that ranks have about as much to do in each."""
        left = sorted(parameters, key=lambda parameter: -parameter.numel() * min(parameter.shape))
        while left:
            size = self._size * max(1, ROUND_NUMBERS // left[0].numel())
            some, left = left[:size], left[size:]
            self.rounds.append([_deal(each, number % self._size, world) for number, each in enumerate(some)])

    def gather(self, some: Sequence[Dealt], mine: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of ``some`` of a round, of which this rank has ``mine``, flat, those that it owns: ``[rows, columns]``."""
        order = sorted(range(len(some)), key=lambda number: some[number].owner)
        sends = [mine[number] for number in order if self._place in some[number].senders]
        outgoing = torch.cat([mine[0][:0], *sends])
        owned = [each for each in some if each.owner == self._place]
        there = [(member, each) for member in range(self._size) for each in owned if member in each.senders]
        came = self._exchange(outgoing, some, owned, False)
        wholes = {id(each): outgoing.new_empty(each.parameter.shape) for each in owned}
        pieces = came.split([each.numbers(member) for member, each in there])
        for (member, each), piece in zip(there, pieces, strict=True):
            block = wholes[id(each)][each.blocks[member]]
            block.copy_(piece.view(block.shape))
        return [wholes[id(each)] for each in owned]

    def scatter(self, some: Sequence[Dealt], found: Sequence[torch.Tensor], like: torch.Tensor) -> list[torch.Tensor]:
        """What this rank has of each of ``some``, flat, where ``found`` ``[rows, columns]`` are those that it owns; of
        the dtype of ``like``, and on its device."""
        owned = [each for each in some if each.owner == self._place]
        sends = [
            whole[each.blocks[member]].reshape(-1)
            for member in range(self._size)
            for each, whole in zip(owned, found, strict=True)
        ]
        came = self._exchange(torch.cat([like[:0], *sends]), some, owned, True)
        order = sorted(range(len(some)), key=lambda number: some[number].owner)
        pieces = came.split([some[number].numbers(self._place) for number in order])
        by_number = dict(zip(order, pieces, strict=True))
        return [by_number[number] for number in range(len(some))]

    def _exchange(
        self, outgoing: torch.Tensor, some: Sequence[Dealt], owned: Sequence[Dealt], back: bool
    ) -> torch.Tensor:
        """To the owners, or ``back`` to who has parts, copies included."""
        if self._group is None:
            return outgoing
        theirs, mine = [0] * self._size, [0] * self._size
        for member in range(self._size):
            theirs[member] = sum(each.numbers(member) for each in owned if back or member in each.senders)
        for each in some:
            mine[each.owner] += each.numbers(self._place) if back or self._place in each.senders else 0
        sent, received = (theirs, mine) if back else (mine, theirs)
        return exchange(outgoing, self._group, sent, received)


def _deal(parameter: torch.nn.Parameter, owner: int, world: World) -> Dealt:
    tensor, along = world.shape.tensor, _tensor_dimension(parameter)
    members = range(world.shards * tensor)
    blocks = tuple(_block(parameter.shape, along, world, *divmod(member, tensor)) for member in members)
    return Dealt(parameter, owner, blocks, members if along is not None else members[::tensor])


def _tensor_dimension(parameter: torch.Tensor) -> int | None:
    """Along which tensor parallelism cuts it; None: not at all."""
    if not isinstance(parameter, DTensor):
        return None
    how = dict(zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True))
    return getattr(how.get("tensor"), "dim", None)


def _block(shape: torch.Size, along: int | None, world: World, shard: int, place: int) -> Block:
    """What the rank at ``place`` of tensor parallelism, in this ``shard``, has: FSDP cuts rows, and it cuts last."""
    (rows, columns), (first, left) = shape, (0, 0)
    if along == 0:
        first, rows = rows_of(rows, place, world.shape.tensor)
    elif along == 1:
        left, columns = rows_of(columns, place, world.shape.tensor)
    more, rows = rows_of(rows, shard, world.shards)
    return slice(first + more, first + more + rows), slice(left, left + columns)
