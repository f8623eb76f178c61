"""Which groups are left out because nothing can be learned from them: `replay.filter`."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from penstock.services.broker.config import ColumnFilter, FilterConfig, RangeFilter, VarianceFilter

WhyFiltered = Literal["equal", "low", "high", "zero", "no_value"]
"""All its values are (nearly) the same; their mean is too low, or too high; all are 0; no answer has one."""


class Verdict(NamedTuple):
    """Why a group is left out."""

    why: WhyFiltered
    words: str


def why_filtered(rule: FilterConfig, values: np.ndarray) -> Verdict | None:
    """``values`` ``[answers]``, floats, of the rule's column; NaN where an answer has none, and no part. None: the
    group is kept. Bounds are compared in float32, which rewards are written in.

    >>> why_filtered(RangeFilter(), np.array([1.0, 1.0, np.nan]))
    Verdict(why='high', words='the mean of its reward is 1, not below 1')
    """
    there = values[~np.isnan(values)]
    if isinstance(rule, ColumnFilter):
        return None if there.any() else Verdict("zero", f"{rule.column} is 0 for each of its answers")
    if not isinstance(rule, RangeFilter | VarianceFilter):
        return None
    if not there.size:
        return Verdict("no_value", f"none of its answers has a value in {rule.column}")
    if isinstance(rule, VarianceFilter):
        if np.float64(there.max()) - np.float64(there.min()) > _rounded_up(rule.tolerance, there):
            return None
        what = "rewards are all equal" if rule == VarianceFilter() else f"values of {rule.column} are all equal"
        return Verdict("equal", f"its {what}" + f", within {rule.tolerance:g}" * bool(rule.tolerance))
    mean = float(there.mean(dtype=np.float64))
    beyond = side_of(mean, rule.low, rule.high)
    if beyond == "low":
        return Verdict("low", f"the mean of its {rule.column} is {mean:g}, not above {rule.low:g}")
    if beyond == "high":
        return Verdict("high", f"the mean of its {rule.column} is {mean:g}, not below {rule.high:g}")
    return None


def side_of(mean: float, low: float, high: float) -> Literal["low", "high"] | None:
    """Whether a group's ``mean`` is at most ``low``, or at least ``high``; compared in float32, which rewards are
    written in."""
    if np.float32(mean) <= np.float32(low):
        return "low"
    return "high" if np.float32(mean) >= np.float32(high) else None


def _rounded_up(tolerance: float, values: np.ndarray) -> float:
    """A ``tolerance`` above 0 with what float32 may have added between ``values``: tenths are alike wherever they
    lie."""
    return tolerance and tolerance + 2 * float(np.spacing(np.float32(np.abs(values).max())))
