"""A scorer that only the tests know, and a loss that reads what it writes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.protocols.experience import Group
from penstock.services.trainer.algorithms.losses.ppo_clip import ppo_clip


class Surprise:
    """How unlikely the policy found each token, times a scale. Notes every group that it was asked about, and dies or
    hangs at the ones that it is told to, once each."""

    def __init__(
        self, notes: str, scale: float = 1.0, dies_at: tuple[int, ...] = (), hangs_at: tuple[int, ...] = ()
    ) -> None:
        self._notes, self._scale, self._dies_at, self._hangs_at = Path(notes), scale, dies_at, hangs_at

    def score_group(self, group: Group, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        tokens = sum(len(t.tokens) for t in group.trajectories)
        assert columns["reference"].shape == (tokens,)
        seen = self._notes.read_text().split() if self._notes.exists() else []
        with self._notes.open("a") as file:
            file.write(f"{group.number}\n")
        if group.number in self._dies_at and str(group.number) not in seen:
            os.kill(os.getpid(), signal.SIGKILL)
        if group.number in self._hangs_at and str(group.number) not in seen:
            time.sleep(600)
        return {"surprise": -self._scale * np.concatenate([t.logprobs for t in group.trajectories])}


def surprised_loss(
    old: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    surprise: torch.Tensor,
    reward_exact_match: torch.Tensor,
    bonus: float = 0.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped loss, with a bonus for what was surprising."""
    assert surprise.shape == log_prob.shape and reward_exact_match.shape == (len(log_prob), 1)
    losses, metrics = ppo_clip(old, log_prob, advantages, mask, weights)
    metrics["seen_surprise"] = (surprise * mask).sum() / mask.sum()
    metrics["surprise_off"] = ((surprise + 2.0 * old) * mask).abs().max()
    return losses - bonus * surprise * log_prob, metrics


def watched(response: str, surprise: Any, reward_exact_match: float) -> float:
    """A reward that reads other columns."""
    return float(np.asarray(surprise).sum()) + reward_exact_match
