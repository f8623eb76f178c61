"""The reward in the table of actors."""

from __future__ import annotations

from typing import Any

from penstock.protocols.columns import REWARD, Column, WeightedSum
from penstock.services.reward.config import ENVIRONMENT
from penstock.services.runtime.registry import ActorSpec


def _columns(config: Any) -> list[Column]:
    return [
        Column(
            name=name,
            scorer="reward",
            per="token" if f.function == ENVIRONMENT else "trajectory",
            nullable=True,
            reads=tuple(f.columns),
            evaluated=True,
            trained=not config.rollout.all_given,
            sources=tuple(f.sources),
            source=f"reward {f.function}",
        )
        for f in config.reward.functions
        for name in f.terms
    ]


def _reward(config: Any) -> list[WeightedSum]:
    """What has weight 0 is only watched, and costs no reward where it fails; but for what the algorithm reads, which
    must be there in all that it trains on."""
    algorithm = config.trainer.algorithm
    read = {constraint.column for constraint in algorithm.constraints}
    for choice in (algorithm.advantage, algorithm.loss, algorithm.correction):
        read |= set(choice.columns)
    terms = {name: weight for f in config.reward.functions for name, weight in f.terms.items()}
    terms |= config.reward.columns
    weighed = tuple(algorithm.advantage.components) if algorithm.advantage.type == "gdpo" else ()
    return [
        WeightedSum(name=REWARD, terms={name: w for name, w in terms.items() if w or name in read}, weighed=weighed)
    ]


def _count(config: Any) -> int:
    """None where nobody would ask them: what is given needs no reward."""
    return config.reward.count if config.prompts.evaluates or not config.rollout.all_given else 0


SPEC = ActorSpec(
    kind="reward",
    make="penstock.services.reward.service:make",
    count=_count,
    unneeded="every answer is given (rollout.given.answers), and nothing is evaluated (prompts.eval)",
    columns=_columns,
    sums=_reward,
)
