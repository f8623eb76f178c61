"""Config sections of advantages that compare an answer with what earlier steps have brought. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from penstock.protocols.columns import AGENT, BASELINE
from penstock.services.trainer.choice import Choice


class RunningAdvantage(Choice):
    """One that is given a baseline, which the learner keeps from step to step."""

    compares = False
    given = (BASELINE,)

    def options(self) -> dict[str, Any]:
        """None of the function's: who follows is the learner."""
        return {}


class RoleAdvantage(RunningAdvantage):
    """RAE, for self-play: the reward, less a running mean of the rewards of its role, so that whoever moves first in a
    game is compared with those who did. Needs no group (`n: 1`)."""

    implementation = "advantages.rae:rae"
    paper = "Liu et al. 2025, arXiv:2506.24119"
    type: Literal["rae"] = "rae"
    role: str | None = None
    """What says an answer's role: a column with a number for each trajectory, e.g. ``reward/role`` of a function of
    weight 0, or a metric of agents or of an environment, e.g. ``agent/branch``. Each number has a mean of its own, for
    each source of prompts. null: the source alone is the role."""
    decay: float = Field(0.95, ge=0, lt=1)
    """How slowly a mean follows: how much of it stays behind each answer's reward, e.g. ``0.99``."""

    @property
    def columns(self) -> list[str]:
        """Of the role, where it is one."""
        return [self.role] if self.role and not self.role.startswith(AGENT) else []


class PromptAdvantage(RunningAdvantage):
    """SPO: the reward, less what earlier answers to the same prompt were worth on average, the older the less; then
    standardised over all answers of the step. Needs no group (`n: 1`), and so nobody waits for the longest answer of
    one."""

    implementation = "advantages.spo:spo"
    paper = "Xu and Ding 2025, arXiv:2509.13232"
    type: Literal["spo"] = "spo"
    decay: float = Field(0.9, ge=0, lt=1)
    """What an earlier answer to a prompt still counts when it is asked again, e.g. ``0.96``; the policy has moved on
    meanwhile."""
    prior: float = Field(8.0, gt=0)
    """As so many answers counts, where a prompt is asked for the first time, the mean over all prompts, e.g. ``4``."""
