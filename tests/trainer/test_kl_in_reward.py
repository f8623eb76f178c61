"""The penalty in the reward: where it lies, and that every learner of a run has the same coefficient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from penstock.protocols.columns import REFERENCE
from penstock.services.learning import checkpoint
from penstock.services.learning.batch import TrainingBatch
from penstock.services.learning.config import CheckpointConfig, KLConfig, Penalties
from penstock.services.learning.kl_in_reward import adapted
from penstock.services.learning.token_rewards import token_rewards
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from tests.trainer.rank_program import a_model
from tests.trainer.steps import Tokenizer, a_step

PENALTY = {"place": "reward", "kind": "k1", "coefficient": 0.1, "target": 0.01, "horizon": 50}


def with_reference(step: TrainingBatch, distance: float) -> TrainingBatch:
    """Every sampled token was likelier by ``distance`` nats than the reference has it."""
    return step.with_tokens(REFERENCE, [(t.logprobs - distance) * t.loss_mask for t in step.trajectories])


def test_each_sampled_token_pays_for_itself() -> None:
    step, state = with_reference(a_step(0), 0.5), {}
    rows = np.arange(len(step.trajectories))
    found = token_rewards(step, rows, Penalties(KLConfig.model_validate(PENALTY)), state)
    for row, trajectory in enumerate(step.trajectories):
        wanted = np.zeros(found.tokens.shape[1])
        wanted[: len(trajectory.tokens)] = -0.05 * trajectory.loss_mask
        wanted[np.flatnonzero(trajectory.loss_mask)[-1]] += step.rewards[row]
        np.testing.assert_allclose(found.tokens[row], wanted, atol=1e-6)
    np.testing.assert_allclose(found.scores, found.tokens.sum(-1), atol=1e-6)
    assert found.metrics["reward_kl"] == pytest.approx(0.5, abs=1e-5)
    assert state["kl_coefficient"] == pytest.approx(0.1 * (1 + 0.2 * len(rows) / 50)), "further off than its target"


def test_a_session_pays_for_what_all_its_branches_did() -> None:
    """Or an agent that begins its history anew would pay for a part of it alone, on average over its branches."""
    step = with_reference(a_step(0), 0.5)
    step = replace(step, sessions=np.array([0, 0, 0, *range(1, 10)]))
    found = token_rewards(step, np.arange(12), Penalties(KLConfig.model_validate(PENALTY)), {})
    sampled = np.array([t.sampled for t in step.trajectories])
    paid = np.array([sampled[:3].sum()] * 3 + sampled[3:].tolist())
    np.testing.assert_allclose(found.scores, step.rewards - 0.05 * paid, atol=1e-5)
    np.testing.assert_allclose(found.tokens.sum(-1), step.rewards - 0.05 * sampled, atol=1e-5)


def test_the_coefficient_stays_above_0_however_large_a_step_is() -> None:
    """As many steps of a horizon each would leave it."""
    for rows, times in ((50, 1), (100, 2), (1000, 20)):
        assert adapted(0.1, 0.0, 0.01, 50, rows) == pytest.approx(0.1 * 0.8**times)
    assert adapted(0.1, 0.0, 0.01, 50, 75) == pytest.approx(0.1 * 0.8 * 0.9)


def test_the_coefficient_is_in_the_checkpoint(tmp_path: Path) -> None:
    def learner() -> Learner:
        algorithm = {"kl": PENALTY}
        return Learner(a_model(), TrainerConfig.model_validate({"algorithm": algorithm}), 1.0)

    one, again = learner(), learner()
    assert one.train(with_reference(a_step(0), 0.5))["kl_coefficient"] == 0.1
    saver = checkpoint.Saver(one, Tokenizer(), tmp_path, CheckpointConfig(keep=1))
    path = saver.begin().result()
    saver.close()
    checkpoint.restore(again, path)
    second = with_reference(a_step(1), 0.0)
    assert again.train(second)["kl_coefficient"] == one.train(second)["kl_coefficient"] > 0.1
    assert again.state == one.state and one.state["kl_coefficient"] < 0.1 * (1 + 0.2 * 12 / 50)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"place": "reward"}, "takes nothing off at coefficient=0"),
        ({"coefficient": 0.1, "target": 0.1}, "place=reward"),
    ],
)
def test_a_penalty_that_would_do_nothing_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        KLConfig.model_validate(given)


def test_a_run_that_goes_on_with_another_penalty_has_that() -> None:
    step = with_reference(a_step(0), 0.5)

    def coefficient(**changes: Any) -> float:
        penalty = Penalties(KLConfig.model_validate(PENALTY | changes))
        state = {"kl_coefficient": 0.31, "kl_coefficient_began": 0.1}
        return token_rewards(step, np.arange(len(step.trajectories)), penalty, state).metrics["kl_coefficient"]

    assert coefficient() == coefficient(target=0.2) == 0.31, "as it has become"
    assert coefficient(coefficient=0.001) == 0.001 and coefficient(target=None) == 0.1
