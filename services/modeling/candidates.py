"""What a sampler that leaves tokens out has chosen from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.protocols.experience import Trajectory
from penstock.services.modeling.pinned import to_device


@dataclass(frozen=True)
class Candidates:
    """Of some tokens, as many as each was chosen from. One token may have a thousand times as many as its neighbours:
    a `table` is made for few tokens at a time."""

    counts: np.ndarray
    """int64 ``[tokens]``; 0: from the whole vocabulary."""
    ids: torch.Tensor
    """int32, where it is computed: each token's, one after the other."""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], device: torch.device) -> Candidates | None:
        """Of all sampled tokens but a trajectory's first, which is predicted by nothing. None where nothing was
        recorded."""
        if not any(t.candidate_ids.size for t in trajectories):
            return None
        counts, ids = [], []
        for t in trajectories:
            sampled = np.flatnonzero(t.loss_mask[1:]) + 1
            noted = t.candidate_counts if t.candidate_counts.size else np.zeros(len(t.tokens), np.int32)
            counts.append(noted[sampled].astype(np.int64))
            ids.append(t.candidate_ids[noted[0] :])
        every = torch.from_numpy(np.concatenate(ids).astype(np.int32))
        return cls(np.concatenate(counts), to_device(every, device))

    def split(self, size: int) -> list[Candidates]:
        """Those of ``size`` tokens each, in order; the last have what is left."""
        parts = np.split(self.counts, range(size, len(self.counts), size))
        ends = np.cumsum([part.sum() for part in parts])
        return [Candidates(part, self.ids[end - part.sum() : end]) for part, end in zip(parts, ends, strict=True)]

    def chosen(self, numbers: np.ndarray) -> Candidates:
        """Those of the tokens with these ``numbers``, int64, in that order."""
        counts = self.counts[numbers]
        ends = np.cumsum(counts)
        firsts = (np.cumsum(self.counts) - self.counts)[numbers] - (ends - counts)
        places = np.repeat(firsts, counts) + np.arange(counts.sum())
        return Candidates(counts, self.ids[to_device(torch.from_numpy(places), self.ids.device)])

    def table(self) -> torch.Tensor:
        """int64 ``[tokens, most]``, padded with -1; a token that was chosen from all has nothing else."""
        most, device = max(1, int(self.counts.max(initial=0))), self.ids.device
        there = torch.arange(most, device=device) < to_device(torch.from_numpy(self.counts), device)[:, None]
        padded = torch.full(there.shape, -1, dtype=torch.int64, device=device)
        return padded.masked_scatter_(there, self.ids.long())
