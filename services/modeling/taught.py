"""Which tokens teachers find likeliest where each sampled token was chosen, and how far the policy is from that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from penstock.protocols.experience import Trajectory
from penstock.services.modeling.pinned import to_device

Compare = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of log-probabilities ``[tokens, outcomes]`` of a teacher and of the policy: a divergence, ``[tokens]``."""


@dataclass(frozen=True)
class Top:
    """What one teacher says of some tokens; as `columns.top_columns` have it, where it is computed with."""

    ids: torch.Tensor
    """int32 ``[tokens, k]``"""
    logs: torch.Tensor
    """float16 ``[tokens, k + 1]``; NaN where this teacher was not asked."""
    weight: float


@dataclass(frozen=True)
class Taught:
    """What all teachers say of some tokens, and how a policy is compared with each."""

    tops: tuple[Top, ...]
    compare: Compare

    @classmethod
    def of(
        cls,
        trajectories: Sequence[Trajectory],
        teachers: Sequence[tuple[Sequence[tuple[np.ndarray, np.ndarray]], float]],
        compare: Compare,
        device: torch.device,
    ) -> Taught:
        """Of all sampled tokens but a trajectory's first, which is predicted by nothing. ``teachers``: of each, ids and
        log-probabilities by trajectory (`TrainingBatch.tops`), and its weight."""
        skipped = [int(t.loss_mask[0]) for t in trajectories]
        found = []
        for parts, weight in teachers:
            ids, logs = (
                np.concatenate([part[which][skip:] for part, skip in zip(parts, skipped, strict=True)])
                for which in (0, 1)
            )
            ids, logs = (to_device(torch.from_numpy(each), device) for each in (ids, logs))
            found.append(Top(ids, logs, weight))
        return cls(tuple(found), compare)

    def split(self, size: int) -> list[Taught]:
        """Those of ``size`` tokens each, in order; the last have what is left."""
        count = len(self.tops[0].ids)
        return [self.chosen(slice(first, first + size)) for first in range(0, count, size)]

    def chosen(self, tokens: torch.Tensor | slice) -> Taught:
        """Those of ``tokens``, int64 numbers of them, in that order."""
        return replace(self, tops=tuple(replace(t, ids=t.ids[tokens], logs=t.logs[tokens]) for t in self.tops))

    def divergence(self, logits: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """``[tokens]``, in nats: of each teacher's distribution over its own tokens and all others together from that
        of ``logits`` ``[tokens, vocabulary]``, whose log-sum-exp is ``total``; the weighted mean over the teachers that
        were asked, 0 where none was. Differentiable."""
        found, weights = torch.zeros_like(total), torch.zeros_like(total)
        size, low = logits.shape[-1], torch.finfo(logits.dtype).min
        for top in self.tops:
            ids, asked = top.ids.long(), ~top.logs[:, -1].isnan()
            # What the policy has not (of a vocabulary padded further, or others than all) has no part, and covers
            # nothing that it has.
            known = ids < size
            unknown = torch.cat([~known, known.sum(-1, keepdim=True) >= size], -1)
            ids = ids.where(known, ids.amin(-1, keepdim=True).clamp(max=size - 1))
            policy = over_top(logits, total, ids).masked_fill(unknown, low)
            # And what 16 bits make of it is a distribution again.
            said = top.logs.to(total.dtype).nan_to_num(0.0).masked_fill(unknown, low).log_softmax(-1)
            far = self.compare(said, policy)
            found = found + top.weight * torch.where(asked, far, 0.0)
            weights = weights + top.weight * asked
        return found / weights.where(weights > 0, 1.0)


def over_top(logits: torch.Tensor, total: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``[tokens, k + 1]``: the log-probabilities of the tokens ``ids`` ``[tokens, k]`` and, last, that of all others
    together, under ``logits`` ``[tokens, vocabulary]``, whose log-sum-exp is ``total`` ``[tokens]``. Where there are no
    others that is about the lowest number there is, and has no gradient."""
    # Not log(1 - sum): where little is left, that would be rounding, and its gradient too.
    rest = logits.scatter(-1, ids, torch.finfo(logits.dtype).min).logsumexp(-1, keepdim=True)
    return torch.cat([logits.gather(-1, ids), rest], -1) - total[:, None]
