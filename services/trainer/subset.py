"""Which answers of a group the policy learns from (`trainer.algorithm.subset`)."""

from __future__ import annotations

import numpy as np

from penstock.protocols.experience import mean_by_session
from penstock.services.learning.batch import TrainingBatch
from penstock.services.trainer.algorithm_config import SubsetConfig


def subset_of(step: TrainingBatch, config: SubsetConfig) -> np.ndarray:
    """bool ``[trajectories]``: those of ``step`` that stay. Of what has no reward all does, as do given answers: nobody
    compares them here. What is taken at random follows from the group's number, so that a redo takes the same."""
    kept = np.ones(len(step.trajectories), bool)
    compared = step.rewarded & ~step.given
    rewards = mean_by_session(step.rewards, step.sessions)  # of an agent's, its branches' mean
    places = np.flatnonzero(compared)
    places = places[np.argsort(step.groups[places], kind="stable")]
    numbers, begins = np.unique(step.groups[places], return_index=True)
    for number, mine in zip(numbers, np.split(places, begins[1:]), strict=True):
        sessions = np.unique(step.sessions[mine])
        kept[mine] = np.isin(step.sessions[mine], sessions[chosen(rewards[sessions], config, int(number))])
    return kept


def chosen(rewards: np.ndarray, config: SubsetConfig, seed: int) -> np.ndarray:
    """Places of those that stay, of ``rewards`` ``[answers]`` of one group, ascending; all, where there are no more.

    >>> chosen(np.array([0.0, 1.0, 0.1, 0.9]), SubsetConfig(keep=2), 0)
    array([0, 1])
    """
    order, keep = np.argsort(-rewards, kind="stable"), config.keep
    if len(order) <= keep:
        return np.arange(len(order))
    best = -(-keep // 2)
    if config.by == "max_variance":
        best = max(range(keep + 1), key=lambda count: rewards[_ends(order, count, keep)].var())
    if config.by == "best_random":
        others = np.random.default_rng(seed).permutation(order[best:])[: keep - best]
        return np.sort(np.concatenate([order[:best], others]))
    return np.sort(_ends(order, best, keep))


def _ends(order: np.ndarray, best: int, keep: int) -> np.ndarray:
    """So many of the ``best``, and of the worst what is left of ``keep``."""
    return np.concatenate([order[:best], order[len(order) - (keep - best) :]])
