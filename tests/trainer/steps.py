"""A step to train on, and the part of a tokenizer that a checkpoint needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from penstock.protocols.experience import Trajectory
from penstock.protocols.routing import unknown
from penstock.services.learning.batch import TrainingBatch
from penstock.services.learning.model_learner import ModelLearner
from tests.conftest import make_group


class Tokenizer:
    eos_token_id, chat_template = None, None

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def routed(trajectories: Sequence[Trajectory], seed: int = 0) -> list[Trajectory]:
    """As if an engine had sent each token to two of eight experts, in one layer; the last one to none, and those of a
    prompt to the same in all trajectories."""
    random, found = np.random.default_rng(seed), []
    for trajectory in trajectories:
        of_prompt = np.random.default_rng(trajectory.tokens[trajectory.loss_mask == 0])
        drawn = [
            (random if sampled else of_prompt).choice(8, (1, 2), replace=False) for sampled in trajectory.loss_mask
        ]
        routing = np.array(drawn, np.uint8)
        routing[-1] = unknown(routing.dtype)
        found.append(replace(trajectory, routing=routing))
    return found


def a_step(seed: int, routing: bool = False, given: int = 0) -> TrainingBatch:
    """Of three groups of four answers. ``given``: every so many-th is, as rollouts give one: without a log-probability;
    0: none is."""
    random = np.random.default_rng(seed)
    groups = [make_group(random, number) for number in range(3)]
    trajectories = [t for group in groups for t in group.trajectories]
    if routing:
        trajectories = routed(trajectories, seed)
    for place in range(given - 1, len(trajectories), given) if given else ():
        one = trajectories[place]
        more = {name: getattr(one, name) for name in ("tokens", "loss_mask", "versions", "routing")}
        more = {name: np.concatenate([values, values[-4:]]) for name, values in more.items()}  # the longest of all
        trajectories[place] = replace(one, given=True, logprobs=np.zeros(len(more["tokens"]), np.float32), **more)
    rewards = random.random(12).astype(np.float32)
    tops = {"teacher": [top_of_one(np.random.default_rng([seed, i]), t.sampled) for i, t in enumerate(trajectories)]}
    return TrainingBatch(trajectories, np.repeat(np.arange(3), 4), np.arange(12), {"reward": rewards}, {}, tops=tops)


def top_of_one(random: np.random.Generator, sampled: int, k: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """What a teacher may say of one trajectory: see `columns.top_columns`."""
    ids = np.array([random.permutation(51)[:k] for _ in range(sampled)], np.int32).reshape(sampled, k)
    drawn = random.normal(0.0, 2.0, (sampled, k + 1))
    return ids, (drawn - np.log(np.exp(drawn).sum(-1, keepdims=True))).astype(np.float16)


def gradient(learner: ModelLearner) -> list[torch.Tensor]:
    """Of each parameter that has one, as it is now."""
    return [p.grad.clone() for p in learner.parameters.values() if p.grad is not None]
