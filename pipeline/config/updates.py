"""How many updates a step has: the critic's where it does not say, and whether a step has groups enough."""

from __future__ import annotations

from typing import Any


def given_by_trainer(data: dict[str, Any]) -> dict[str, Any]:
    """``data`` of a whole config: the critic learns as often as the trainer, where it says nothing else."""
    trainer, critic = data.get("trainer"), data.get("critic", {})
    if not isinstance(trainer, dict) or not isinstance(critic, dict):
        return data
    # What is no number is told of the trainer's key alone.
    own = {key: trainer[key] for key in ("epochs", "mini_batches") if isinstance(trainer.get(key), int)}
    return {**data, "critic": {**own, **critic}} if own else data


def check_updates(config: Any) -> None:
    """Raises `ValueError` where a learner is to make more updates in an epoch than a step has groups."""
    for key, learner in (("trainer", config.trainer), ("critic", config.critic)):
        if learner.mini_batches > config.gate.groups_per_step:
            raise ValueError(
                f"{key}.mini_batches={learner.mini_batches} is more than gate.groups_per_step="
                f"{config.gate.groups_per_step}: each is made of whole groups"
            )
