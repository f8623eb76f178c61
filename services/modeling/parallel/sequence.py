"""Ulysses' sequence parallelism: ranks share the tokens of a packed row, and in attention its heads.

    every rank:  own tokens, all heads ─▶ all-to-all ─▶ all tokens, own heads ─▶ attention ─▶ all-to-all ─▶ own tokens

Everything but attention works on single tokens, so a rank computes and keeps 1/size of the activations. Jacobs et al.
2023, arXiv:2309.14509.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from penstock.services.modeling.parallel.exchange import exchange
from penstock.services.modeling.routing import OPEN
from penstock.services.runtime.errors import SetupError


@dataclass(frozen=True)
class SequenceParallel:
    """This rank's place among ``size`` that share each row."""

    rank: int
    size: int
    group: Any

    def part(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """What the model is called with for this rank's tokens: of ``inputs`` for a whole packed row."""
        found = dict(inputs)
        for name in {"input_ids", "position_ids", "routing"} & inputs.keys():
            found[name] = self.own(inputs[name], OPEN if name == "routing" else 0)
        found["segments"] = replace(inputs["segments"], ulysses=self)
        return found

    def own(self, row: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """This rank's tokens of ``row`` ``[1, length, …]``, which is padded with ``fill`` so that it can be cut."""
        return self._padded(row, 1, fill).chunk(self.size, 1)[self.rank]

    def owners(self, source: np.ndarray, length: int) -> list[np.ndarray]:
        """For each rank, which of the places ``source`` (int64 ``[places]``) in a row of ``length`` it has."""
        owner = source // self._share(length)
        return [np.flatnonzero(owner == rank) for rank in range(self.size)]

    def first(self, length: int) -> int:
        """This rank's first place in a row of ``length``."""
        return self.rank * self._share(length)

    def dealt(
        self, length: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value ``[own tokens, heads, size]`` as ``[length, own heads, size]``."""
        key, value = (self.shared(query.shape[1], tensor) for tensor in (key, value))
        q, k, v = (self.to_heads(tensor.contiguous(), length) for tensor in (query, key, value))
        return q, k, v

    def own_heads(self, every: torch.Tensor) -> torch.Tensor:
        """Of ``[heads]`` those that this rank attends with."""
        return every.chunk(self.size)[self.rank]

    def to_heads(self, tokens: torch.Tensor, length: int) -> torch.Tensor:
        """``[own tokens, heads, size]`` to ``[length, own heads, size]``. Differentiable."""
        count, heads, width = tokens.shape
        mine = tokens.view(count, self.size, heads // self.size, width).transpose(0, 1).contiguous()
        return exchange(mine, self.group).flatten(0, 1)[:length]

    def to_tokens(self, heads: torch.Tensor) -> torch.Tensor:
        """The inverse."""
        padded = self._padded(heads, 0)
        found = exchange(padded.view(self.size, -1, *padded.shape[1:]), self.group)
        return found.transpose(0, 1).flatten(1, 2)

    def shared(self, heads: int, key: torch.Tensor) -> torch.Tensor:
        """``key`` ``[tokens, KV heads, size]`` with as many heads as can be dealt out: each repeated where there are
        fewer than ranks. Raises `SetupError` where the ``heads`` of the queries, or these, cannot be cut."""
        kv = key.shape[1]
        if heads % self.size or (kv % self.size and self.size % kv):
            raise SetupError(
                f"sequence_parallel={self.size}: {heads} attention heads and {kv} of keys and values cannot be "
                "dealt out to as many ranks; take a divisor of both"
            )
        return key if kv % self.size == 0 else key.repeat_interleave(self.size // kv, 1)

    def gather(self, mine: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """``[which, own]`` of every rank, which have ``counts``. The gradient of each is that of its own alone: all
        ranks compute the same loss of all."""
        found: torch.Tensor = _Gather.apply(mine, tuple(counts), self.rank, self.group)
        return list(found.split(list(counts), 1))

    def _share(self, length: int) -> int:
        return -(-length // self.size)

    def _padded(self, tensor: torch.Tensor, dim: int, fill: int = 0) -> torch.Tensor:
        length = tensor.shape[dim]
        missing = self._share(length) * self.size - length
        if not missing:
            return tensor
        shape = [*tensor.shape]
        shape[dim] = missing
        return torch.cat([tensor, tensor.new_full(shape, fill)], dim)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, counts: tuple[int, ...], rank: int, group: Any) -> torch.Tensor:
        ctx.first, ctx.count = sum(counts[:rank]), counts[rank]
        padded = mine.new_zeros((len(mine), max(counts)))
        padded[:, : counts[rank]] = mine
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:, :count] for part, count in zip(parts, counts, strict=True)], 1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0][:, ctx.first : ctx.first + ctx.count], None, None, None
