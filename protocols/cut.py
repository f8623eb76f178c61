"""How the rows of a version's weights are cut over the trainer's ranks: known to both sides of the weight channel."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


def rows_of(rows: int, rank: int, size: int) -> tuple[int, int]:
    """First row and number of rows of a rank's part, as `torch.chunk` cuts."""
    part = -(-rows // size)
    first = min(rank * part, rows)
    return first, min(part, rows - first)


class Cut(BaseModel):
    """Which rows of each weight a rank sends. Ranks are numbered stage by stage, in each replica by replica, in each of
    these shard by shard, and in each of those by their place in tensor parallelism.

    FSDP cuts rows over the shards. Ranks that hold the same rows (replicas, and tensor parallel ranks of what that does
    not cut) share the sending: each has a part of them. ``blocks`` are cut by tensor parallelism first, and then over
    the shards. ``dealt`` are cut over the ranks that share experts, which follow each other among the shards, and then
    over the shards that are left. What another stage has it does not send at all.

    >>> cut = Cut(shards=2, tensor=2, blocks=(1,))
    >>> [cut.rows(0, 8, rank) for rank in range(4)]  # rank 1 is shard 0, second in tensor parallelism
    [(0, 2), (2, 2), (4, 2), (6, 2)]
    >>> [cut.rows(1, 8, rank) for rank in range(4)]
    [(0, 2), (4, 2), (2, 2), (6, 2)]
    >>> [Cut(shards=4, experts=2, dealt=(0,)).rows(0, 8, rank) for rank in range(4)]
    [(0, 2), (4, 2), (2, 2), (6, 2)]
    >>> [Cut(shards=2, stages=2, placed=(1,)).rows(0, 8, rank) for rank in range(4)]
    [(0, 0), (0, 0), (0, 4), (4, 4)]
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    replicas: int = Field(1, ge=1)
    shards: int = Field(1, ge=1)
    tensor: int = Field(1, ge=1)
    blocks: tuple[int, ...] = ()
    """Numbers, in the layout, of the weights whose rows tensor parallelism cuts."""
    experts: int = Field(1, ge=1)
    """Ranks that share each layer's experts."""
    dealt: tuple[int, ...] = ()
    """Numbers of the weights whose rows are experts, and are dealt out."""
    stages: int = Field(1, ge=1)
    """Of the pipeline."""
    placed: tuple[int, ...] = ()
    """For each weight the stage that sends it, where there are several."""

    @property
    def ranks(self) -> int:
        """Of the trainer."""
        return self.stages * self.replicas * self.shards * self.tensor

    def rows(self, weight: int, rows: int, rank: int) -> tuple[int, int]:
        """First row and number of rows that ``rank`` sends of the weight with this number, which has ``rows``."""
        stage, rank = divmod(rank, self.ranks // self.stages)
        if self.placed and self.placed[weight] != stage:
            return 0, 0
        shard_of, place = divmod(rank, self.tensor)
        replica, shard = divmod(shard_of, self.shards)
        first, count = 0, rows
        parts = [(shard, self.shards), (place, self.tensor), (replica, self.replicas)]
        if weight in self.blocks:
            parts[:2] = reversed(parts[:2])
        elif weight in self.dealt:
            outer, inner = divmod(shard, self.experts)
            parts[:1] = [(inner, self.experts), (outer, self.shards // self.experts)]
        for part, size in parts:
            more, count = rows_of(count, part, size)
            first += more
        return first, count
