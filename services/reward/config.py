"""Config sections of the reward processes."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from penstock.services.runtime.settings import Section

REGISTRY = {
    "exact_match": "penstock.services.reward.functions.exact_match:exact_match",
    "number": "penstock.services.reward.functions.number:number",
    "reasoning_gym": "penstock.services.reward.functions.reasoning_gym:reasoning_gym",
}
"""Reward functions by name."""


class FunctionConfig(Section):
    """One reward function: ``function(response=…, truth=…, prompt=…, **options) -> float``, plain or async."""

    function: str = "exact_match"
    """One of those that come with Penstock (``exact_match``, ``number``, ``reasoning_gym``), or one of your own,
    e.g. ``my_rewards:length``."""
    weight: float = 1.0
    """Its share: the reward is the weighted sum of all functions."""
    timeout_s: float = Field(10.0, gt=0)
    """A call that takes more seconds is ended, and costs its trajectory the reward."""
    options: dict[str, Any] = {}
    """What the function is called with besides, e.g. ``{tolerance: 0.01}``."""

    @field_validator("function")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in REGISTRY and value.count(":") != 1:
            raise ValueError(f"{value!r} is neither module:function nor one of {', '.join(sorted(REGISTRY))}")
        return value


class RewardConfig(Section):
    """The reward processes."""

    count: int = Field(1, ge=1)
    """How many reward processes."""
    functions: list[FunctionConfig] = Field([FunctionConfig()], min_length=1)
    """The functions whose weighted sum is the reward. They run in worker processes, e.g. ``[{function: number, weight:
    0.5}]``."""
    workers: int = Field(1, ge=1)
    """Worker processes that run the functions, in each reward process."""
    groups_in_hand: int = Field(32, ge=1)
    """Groups that one reward process asks for at once."""
