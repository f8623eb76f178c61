"""Sums and means within groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Groups:
    """Which rows belong together."""

    member: torch.Tensor
    """int64 ``[rows]``: each row's group, from 0."""
    count: torch.Tensor
    """``[groups]``: rows in each, in the scores' dtype."""

    @classmethod
    def of(cls, groups: torch.Tensor, dtype: torch.dtype) -> Groups:
        """``groups`` ``[rows]``: any integer that is the same within a group."""
        _, member = torch.unique(groups, return_inverse=True)
        return cls(member, torch.bincount(member).to(dtype))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """``[groups]``, of ``[rows]``."""
        return torch.zeros_like(self.count).index_add_(0, self.member, values)

    def one_of_each(self) -> torch.Tensor:
        """int64 ``[groups]``: a row of each."""
        rows = torch.arange(len(self.member))
        return torch.zeros(len(self.count), dtype=torch.long).scatter_(0, self.member, rows)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """``[groups]``, of ``[rows]``; 0 of a group of one, which has nobody to be compared with."""
        return torch.where(self.count > 1, self.sum(values) / self.count, 0.0)

    def centred(self, values: torch.Tensor) -> torch.Tensor:
        """``[rows]``: each less its group's mean."""
        return values - self.mean(values)[self.member]

    def deviation(self, values: torch.Tensor) -> torch.Tensor:
        """``[groups]``: the unbiased standard deviation; 1 of a group of one."""
        squares = self.sum(self.centred(values) ** 2)
        return torch.where(self.count > 1, (squares / (self.count - 1).clamp(min=1)).sqrt(), 1.0)

    def standardised(self, values: torch.Tensor) -> torch.Tensor:
        """``[rows]``: each less its group's mean, divided by (the group's `deviation` + 1e-6)."""
        return self.centred(values) / (self.deviation(values)[self.member] + 1e-6)

    def compared(self, values: torch.Tensor, std: bool) -> torch.Tensor:
        """``[rows]``: `standardised` with ``std``, else `centred`."""
        return self.standardised(values) if std else self.centred(values)

    def beside_others(self, values: torch.Tensor, std: bool) -> torch.Tensor:
        """``[rows]``: each less the mean of its group's others; with ``std`` divided by (their unbiased standard
        deviation + 1e-6), where they are not all equal. A group of one keeps its value."""
        count, total = self.count[self.member], self.sum(values)[self.member]
        found = values - torch.where(count > 1, (total - values) / (count - 1).clamp(min=1), 0.0)
        for rows in torch.argsort(self.member, stable=True).split(self.count.long().tolist()) if std else ():
            size = len(rows)
            if size > 2:
                alone = torch.eye(size, dtype=torch.bool, device=values.device)
                others = values[rows].expand(size, size)[~alone].view(size, size - 1)
                differ = others.amax(-1) > others.amin(-1)  # of equal ones rounding leaves no deviation of 0
                found[rows] /= torch.where(differ, others.std(-1) + 1e-6, 1.0)
        return found
