"""What each prompt's answers were worth so far: Xu and Ding 2025, arXiv:2509.13232 (SPO). Where rewards are 0 or 1,
worth and weight are those of its Beta distribution: α / (α + β), and α + β."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.services.learning.batch import TrainingBatch

ALL = "baseline/all"
"""In a learner's state: the mean over all prompts' answers, a step's own as much as `decay` leaves to it."""
WORTH, WEIGHT = "worth/", "weight/"
"""In a learner's state, before a prompt's name: the mean of its answers, and how many they count as."""


def tracked_values(
    rewards: Sequence[float], prompts: Sequence[str], sessions: Sequence[int], decay: float, prior: float,
    state: dict[str, float],
) -> np.ndarray:  # fmt: skip
    """float64 ``[rows]``: what each row's prompt was worth before the step; of one that is asked for the first time,
    the mean over all. ``state`` then has the rows' ``rewards``: with W a prompt's weight, W ← decay · W + 1 for an
    answer, and its worth is their mean, so weighted. Rows that are branches of one session are one answer, of their
    mean reward."""
    answers: dict[str, dict[int, list[float]]] = {}
    for reward, prompt, session in zip(rewards, prompts, sessions, strict=True):
        answers.setdefault(prompt, {}).setdefault(session, []).append(float(reward))
    means = {prompt: [sum(each) / len(each) for each in of.values()] for prompt, of in answers.items()}
    every = [mean for of in means.values() for mean in of]
    before = state.get(ALL, sum(every) / len(every) if every else 0.0)
    worth = {prompt: state.get(WORTH + prompt, before) for prompt in means}
    for prompt, own in means.items():
        weight = decay * state.get(WEIGHT + prompt, prior)
        state[WEIGHT + prompt] = weight + len(own)
        state[WORTH + prompt] = (weight * worth[prompt] + sum(own)) / (weight + len(own))
    if every:
        state[ALL] = decay * before + (1 - decay) * sum(every) / len(every)
    return np.array([worth[prompt] for prompt in prompts])


def names_of(step: TrainingBatch, rows: np.ndarray) -> list[str]:
    """Of each of ``rows``: its prompt's source and place in that."""
    prompts = [step.prompts[row] for row in rows.tolist()]
    return [f"{prompt.source}/{prompt.index}" for prompt in prompts]
