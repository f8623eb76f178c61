"""Single-stream policy optimization: each prompt is compared with its own past, also after a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocols.columns import REWARD
from penstock.protocols.experience import Prompt
from penstock.services.learning import checkpoint
from penstock.services.learning.batch import TrainingBatch
from penstock.services.learning.config import CheckpointConfig
from penstock.services.trainer.algorithms.advantages.spo import spo
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from penstock.services.trainer.prompt_tracker import tracked_values
from tests.trainer.rank_program import a_model
from tests.trainer.steps import Tokenizer, a_step


@given(
    steps=st.lists(st.dictionaries(st.sampled_from("abc"), st.booleans(), min_size=1), min_size=1, max_size=12),
    decay=st.sampled_from([0.0, 0.5, 0.9]), prior=st.sampled_from([0.5, 8.0]),
)  # fmt: skip
def test_a_prompts_worth_is_that_of_its_beta_distribution(
    steps: list[dict[str, bool]], decay: float, prior: float
) -> None:
    """Of the paper's: α ← ρα + r, β ← ρβ + 1 − r, with the mean over all where it is asked first."""
    state: dict[str, float] = {}
    beta: dict[str, list[float]] = {}
    over_all: float | None = None
    for step in steps:
        rewards = [float(right) for right in step.values()]
        over_all = np.mean(rewards).item() if over_all is None else over_all
        found = tracked_values(rewards, [*step], range(len(step)), decay, prior, state)
        for worth, (name, right) in zip(found, step.items(), strict=True):
            each = beta.setdefault(name, [prior * over_all, prior * (1 - over_all)])
            assert worth == pytest.approx(each[0] / sum(each), abs=1e-9)
            each[:] = [decay * each[0] + right, decay * each[1] + 1 - right]
        over_all = decay * over_all + (1 - decay) * np.mean(rewards).item()


def test_all_answers_of_a_step_are_compared_with_what_was_there_before() -> None:
    state: dict[str, float] = {}
    tracked_values([1.0], ["a"], [0], 0.5, 1.0, state)
    found = tracked_values([0.0, 0.0, 4.0, 0.0], ["a", "a", "b", "b"], [0, 1, 2, 2], 0.5, 1.0, state)
    assert found.tolist() == [1.0, 1.0, 1.0, 1.0]
    assert state["worth/a"] == pytest.approx(0.75 / 2.75), "two answers, of a past that counts 0.75"
    assert state["worth/b"] == pytest.approx(2.5 / 1.5), "branches of a session are one answer"


def test_advantages_are_standardised_over_the_step() -> None:
    scores, worth, mask = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.5, 0.5, 1.0]), torch.ones(3, 2)
    found = spo(scores, mask, torch.arange(3), worth)
    torch.testing.assert_close(found[:, 0], torch.tensor([0.5, -0.5, 0.0]) / np.sqrt(1 / 6), atol=1e-4, rtol=1e-4)


def asked(seed: int) -> TrainingBatch:
    """Twelve prompts, of which those with an even number are always answered rightly."""
    prompts = tuple(Prompt(index=i, text="x") for i in range(12))
    rewards = np.arange(12).astype(np.float32) % 2
    return replace(a_step(seed), prompts=prompts, values={REWARD: 1 - rewards}, groups=np.arange(12))


def test_what_was_expected_teaches_nothing_also_after_a_checkpoint(tmp_path: Path) -> None:
    def learner() -> Learner:
        algorithm = {"preset": "spo", "advantage": {"decay": 0.5}}
        return Learner(a_model(), TrainerConfig.model_validate({"algorithm": algorithm}), 1.0)

    one, again = learner(), learner()
    for seed in range(40):
        one._advantages(asked(seed))
    surprised = replace(asked(40), values={REWARD: np.array([0.0] + [0.0, 1.0] * 5 + [0.0], np.float32)})
    metrics = one.train(surprised)
    assert metrics["baseline/all"] == pytest.approx(0.5, abs=0.05) and not any("worth" in name for name in metrics)
    saver = checkpoint.Saver(one, Tokenizer(), tmp_path, CheckpointConfig(keep=1))
    path = saver.begin().result()
    saver.close()
    checkpoint.restore(again, path)
    assert again.state == one.state and len(one.state) == 2 * 12 + 1
    found, wanted = again._advantages(asked(41))[0], one._advantages(asked(41))[0]
    torch.testing.assert_close(found, wanted)
    worth = wanted.abs().amax(-1)
    assert worth[0] > 1 and worth[0] > 2 * worth[1:].max(), "only the one that was wrong once is a surprise again"
