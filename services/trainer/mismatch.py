"""How far the trainer's log-probabilities are from those that engines reported, over one batch.

Two things add up in it: the policy has moved on since it sampled (lag), and engine and trainer compute the same policy
in different ways. The second shows alone in the tokens of the version that the trainer holds (``fresh``).
Liu et al. 2025, "When Speed Kills Stability"; the k3 estimator is Schulman 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from penstock.services.learning.masked_mean import LOG_RATIO_LIMIT
from penstock.services.modeling.parallel.world import World

SUMS = (
    "tokens", "absolute", "kl", "kl_k3", "chi2_token", "weight", "weight2", "fresh_tokens", "fresh", "fresh_kl_k3",
    "rows", "chi2_sequence", "train_ppl", "rollout_ppl", "train_log_ppl", "rollout_log_ppl", "log_ppl_abs_diff",
)  # fmt: skip


def far_apart(metrics: Mapping[str, float], bound: float) -> str | None:
    """What is to be said of a step whose ``mismatch_kl_k3`` is above ``bound``, as far as fresh tokens tell why; None
    of others."""
    if metrics.get("mismatch_kl_k3", 0.0) <= bound:
        return None
    fresh = metrics.get("mismatch_fresh_kl_k3")
    if fresh is None:
        return "the trainer is far from what engines reported: by lag, or since they disagree; no token was fresh"
    return "engines and trainer disagree" if fresh > bound else "the policy is far from the versions that wrote tokens"


@dataclass
class Mismatch:
    """Sums over the micro-batches of a step, in float64."""

    _sums: torch.Tensor | None = None
    """Of `SUMS`, where they were computed: a number that is asked for would have to be waited for."""
    _largest: torch.Tensor | None = None

    @torch.no_grad()
    def add(self, train: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, fresh: torch.Tensor) -> None:
        """Takes log-probabilities ``[trajectories, length]`` where the bool ``mask`` is set; ``fresh`` (bool) is set
        for tokens that the trainer's own version sampled."""
        if not mask.numel():
            return
        d = ((train - rollout) * mask).double()
        bounded = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        valid, length = mask.double(), mask.sum(-1).clamp(min=1)
        some = mask.any(-1).double()
        train_log, rollout_log = (-(x.double() * valid).sum(-1) / length for x in (train, rollout))
        found = {
            "tokens": valid.sum(),
            "absolute": d.abs().sum(),
            "kl": -d.sum(),
            "kl_k3": ((d.exp() - d - 1) * valid).sum(),
            "chi2_token": (((2 * bounded).exp() - 1) * valid).sum(),
            "weight": (bounded.exp() * valid).sum(),
            "weight2": ((2 * bounded).exp() * valid).sum(),
            "fresh_tokens": (fresh & mask).sum(),
            "fresh": (d.abs() * fresh).sum(),
            "fresh_kl_k3": ((d.exp() - d - 1) * valid * fresh).sum(),
            "rows": some.sum(),
            "chi2_sequence": (((2 * d.sum(-1).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).exp() - 1) * some).sum(),
            "train_ppl": (train_log.exp() * some).sum(),
            "rollout_ppl": (rollout_log.exp() * some).sum(),
            "train_log_ppl": (train_log * some).sum(),
            "rollout_log_ppl": (rollout_log * some).sum(),
            "log_ppl_abs_diff": ((train_log - rollout_log).abs() * some).sum(),
        }
        values, largest = torch.stack([found[name].double() for name in SUMS]), d.abs().max()
        self._sums = values if self._sums is None else self._sums + values
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)

    def metrics(self, world: World) -> dict[str, float]:
        """Over all ranks. ``mismatch`` is the mean absolute difference, ``mismatch_ess`` the effective sample size of
        the importance weights as a share of the tokens; ``mismatch_fresh``, and its k3, are there where tokens were
        fresh."""
        sums = dict(zip(SUMS, world.sum([0.0] * len(SUMS) if self._sums is None else self._sums.tolist()), strict=True))
        tokens, rows = max(sums["tokens"], 1.0), max(sums["rows"], 1.0)
        found = {
            "mismatch": sums["absolute"] / tokens,
            "mismatch_max": world.max(0.0 if self._largest is None else float(self._largest)),
            "mismatch_ess": sums["weight"] ** 2 / (tokens * sums["weight2"]) if sums["weight2"] else 1.0,
        }
        found |= {f"mismatch_{name}": sums[name] / tokens for name in ("kl", "kl_k3", "chi2_token")}
        by_row = ("chi2_sequence", "train_ppl", "rollout_ppl", "train_log_ppl", "rollout_log_ppl", "log_ppl_abs_diff")
        found |= {f"mismatch_{name}": sums[name] / rows for name in by_row}
        if sums["fresh_tokens"]:
            found |= {f"mismatch_{name}": sums[name] / sums["fresh_tokens"] for name in ("fresh", "fresh_kl_k3")}
        return found
