"""What a step of a config consists of, where nobody has seen one."""

from __future__ import annotations

from penstock.pipeline.config import Config
from penstock.pipeline.resources.step_time import PROMPT, Load
from penstock.services.rollout.config import HTTP_SEQUENCES, NoEngineConfig, PluginEngineConfig


def longest_response(config: Config) -> int:
    """Tokens of a trajectory that may be sampled at most: in all its turns, and no more than an engine has room for."""
    rollout = config.rollout
    if config.gateway.count and rollout.engine.max_length:  # a session may have any number of turns
        return rollout.engine.max_length
    turns = max((environment.max_turns for environment in rollout.all_environments.values()), default=1)
    sampled = turns * (rollout.sampling.max_new_tokens or 0)
    return min(filter(None, (sampled, rollout.engine.max_length)))


def most_at_once(config: Config) -> int:
    """Sequences that an engine may decode at once, whatever memory it has for them."""
    engine = config.rollout.engine
    if isinstance(engine, NoEngineConfig):
        return HTTP_SEQUENCES
    return engine.in_flight if isinstance(engine, PluginEngineConfig) else engine.max_sequences


def half_of_the_longest(config: Config) -> int:
    """Tokens of a response, where nobody knows better."""
    return max(1, longest_response(config) // 2)


def load_of(config: Config, response: float, prompt: float = PROMPT) -> Load:
    """A step's, with responses of so many tokens, given ones too, to prompts of so many."""
    each = config.gate.groups_per_step * max(1.0, response)
    given = config.rollout.given.count * each
    group = config.sampling.trajectories
    tokens, length = group * each, float(prompt + response)
    return Load(tokens, length, float(prompt), given, group, config.reference_in_trainer)
