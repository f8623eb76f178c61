"""How much of its steps' experience a run has in Redis at once."""

from __future__ import annotations

from penstock.pipeline.config import Config
from penstock.pipeline.resources.model_shape import shape_of
from penstock.services.runtime.gpus import GIB

TOKEN_BYTES = 17
"""Of a token: its id, log-probability, version, mask, and what a column of tokens has for it, as groups are packed."""
CANDIDATE_BYTES = 6
"""Of each token that a teacher names beside it: id, log-probability."""


def store_gib(config: Config) -> float:
    """At the most, if every answer were as long as it may be: the groups of the steps that no checkpoint covers yet,
    and those that are ahead. Pictures come on top."""
    shape = shape_of(config)
    token: float = TOKEN_BYTES + CANDIDATE_BYTES * sum(scorer.top_k for scorer in config.scorers.values())
    if config.rollout.sampling.routing_replay and shape is not None:
        token += shape.routed_bytes
    if config.with_critic:
        every = max(config.trainer.checkpoint.every, config.critic.checkpoint.every)
    else:
        every = config.trainer.checkpoint.every
    steps = min(every, config.trainer.steps or every) + config.gate.max_lag + 1
    answers = config.gate.groups_per_step * config.rollout.sampling.n
    longest = config.rollout.engine.max_length or 2 * (config.rollout.sampling.max_new_tokens or 0)
    return steps * answers * longest * token / GIB
