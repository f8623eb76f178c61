"""Several updates a step: whole groups, each once an epoch, the same whenever the step is made again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.pipeline.config import Config
from penstock.services.learning.batch import TrainingBatch
from penstock.services.learning.model_learner import mean_metrics, mini_batches
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from penstock.services.trainer.mismatch import far_apart
from tests.trainer.rank_program import a_model
from tests.trainer.steps import a_step


def learner(**given: Any) -> Learner:
    return Learner(a_model(), TrainerConfig.model_validate({"optimizer": {"lr": 1e-2}, **given}), 1.0)


def weights(of: Learner) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in of.parameters.values()])


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_a_step_without_any_reward_changes_nothing(mini_batches: int) -> None:
    one, step = learner(mini_batches=mini_batches), a_step(0)
    step.values["reward"][:] = float("nan")
    before = weights(one)
    metrics = one.train(step)
    assert metrics["grad_norm"] == 0 and metrics["reward_missing"] == len(step.trajectories) and one.version == 1
    assert torch.equal(weights(one), before)


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=9), epochs=st.integers(1, 3), parts=st.integers(1, 4))
def test_every_epoch_has_every_group_once_and_whole(sizes: list[int], epochs: int, parts: int) -> None:
    numbers = np.repeat(np.arange(len(sizes)) + 40, sizes)
    step = TrainingBatch([None] * len(numbers), numbers, numbers, {}, {})  # type: ignore[list-item]
    found = list(mini_batches(step, epochs, parts))
    assert len(found) == epochs * parts
    for epoch in range(epochs):
        rows = found[epoch * parts : (epoch + 1) * parts]
        assert sorted(np.concatenate(rows)) == list(range(len(numbers)))
        assert all(set(numbers[a]).isdisjoint(numbers[b]) for a in rows for b in rows if a is not b)
    assert all(np.array_equal(a, b) for a, b in zip(found, mini_batches(step, epochs, parts), strict=True))


def test_a_step_of_several_updates_is_one_version_and_the_same_again() -> None:
    one, other, plain = (learner(epochs=2, mini_batches=3), learner(epochs=2, mini_batches=3), learner())
    metrics = [each.train(a_step(0)) for each in (one, other)]
    assert one.version == 1 and metrics[0] == metrics[1]
    assert torch.equal(weights(one), weights(other))
    plain.train(a_step(0))
    start = weights(learner())
    assert (weights(one) - start).norm() > 2 * (weights(plain) - start).norm()


def test_the_clip_holds_an_update_back_from_where_the_step_began() -> None:
    """With the proximal ratio the first update of a step clips nothing; those after it do, by how far it moved."""
    algorithm = {"ratio": "proximal", "loss": {"type": "ppo_clip", "clip_low": 0.01, "clip_high": 0.01}}
    assert learner(algorithm=algorithm).train(a_step(1))["clip_fraction"] == 0
    assert learner(algorithm=algorithm, epochs=4).train(a_step(1))["clip_fraction"] > 0.2


def test_a_correction_weighs_the_policy_that_the_step_began_with() -> None:
    """However far its updates go: the importance weights are those of the first."""
    algorithm = {"ratio": "proximal", "correction": {"type": "truncated"}}
    once, often = (learner(algorithm=algorithm, epochs=epochs).train(a_step(2)) for epochs in (1, 4))
    assert often["is_weight_mean"] == pytest.approx(once["is_weight_mean"], rel=1e-5)
    assert often["mismatch"] == pytest.approx(once["mismatch"], rel=1e-5)
    assert often["approx_kl"] != pytest.approx(once["approx_kl"], abs=1e-6)


def test_a_step_whose_weights_are_all_0_changes_nothing() -> None:
    correction = {"type": "icepop", "level": "sequence", "lower": 0.999, "upper": 1.001, "normalize": True}
    one = learner(algorithm={"loss": {"type": "reinforce"}, "correction": correction})
    before, metrics = weights(one), one.train(a_step(0))
    assert metrics["is_weight_mean"] == metrics["loss"] == metrics["grad_norm"] == metrics["skipped"] == 0
    assert torch.equal(weights(one), before)


def test_the_learning_rate_warms_up_once_the_policy_is_no_longer_frozen() -> None:
    optimizer = {"lr": 1e-2, "warmup_steps": 2, "schedule": "linear", "final_lr_share": 0.5}
    one = Learner(a_model(), TrainerConfig.model_validate({"steps": 6, "optimizer": optimizer}), 1.0, frozen_steps=2)
    start = weights(one)
    rates, moved = [], []
    for seed in range(6):
        rates.append(one.train(a_step(seed))["lr"])
        moved.append(not torch.equal(weights(one), start))
    assert rates == pytest.approx([0.005, 0.005, 0.005, 0.01, 0.01, 0.005])
    assert moved == [False, False, True, True, True, True]


@pytest.mark.parametrize("ratio", ["behaviour", "interpolated"])
def test_engine_and_trainer_are_compared_before_the_first_update(ratio: str) -> None:
    """Nothing keeps what the policy said then: what later updates see is how far the step has moved."""
    given = {"ratio": ratio, "correction": {"type": "truncated" if ratio == "interpolated" else "none"}}
    once, often = (learner(algorithm=given, epochs=epochs).train(a_step(2)) for epochs in (1, 4))
    compared = [name for name in once if name.startswith(("mismatch", "lag/")) and not name.endswith("clipped")]
    assert len(compared) > 10
    assert {name: often[name] for name in compared} == pytest.approx({name: once[name] for name in compared}, rel=1e-5)


def test_what_is_far_apart_is_blamed_on_the_engine_only_where_fresh_tokens_are_too() -> None:
    far = {"mismatch_kl_k3": 0.2}
    assert far_apart({"mismatch_kl_k3": 0.05}, 0.05) is far_apart({}, 0.05) is None
    assert far_apart(far | {"mismatch_fresh_kl_k3": 0.1}, 0.05) == "engines and trainer disagree"
    assert "far from the versions" in str(far_apart(far | {"mismatch_fresh_kl_k3": 0.001}, 0.05))
    assert "no token was fresh" in str(far_apart(far, 0.05))


def test_more_mini_batches_than_groups_are_refused() -> None:
    given = {"model": {"type": "tiny"}, "prompts": {"train": {"type": "sort"}}, "gate": {"groups_per_step": 4}}
    with pytest.raises(ValidationError, match=r"trainer\.mini_batches=8 is more than gate\.groups_per_step=4"):
        Config.model_validate({**given, "trainer": {"mini_batches": 8}})


@pytest.mark.parametrize("loss", ["clip_cov", "m2po"])
def test_tokens_are_picked_from_their_own_update_alone(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass that looks for them is over the trajectories of its mini-batch."""
    one = learner(algorithm={"loss": {"type": loss}}, mini_batches=3)
    seen, evaluate = [], one.evaluate

    def counted(step: TrainingBatch, compute: Any) -> list[np.ndarray]:
        seen.append(len(step.trajectories))
        return evaluate(step, compute)

    monkeypatch.setattr(one, "evaluate", counted)
    one.train(a_step(0))
    assert seen == [4, 4, 4]


PICKING = {
    "clip_cov": ({"cov_low": 0.0, "drop_fraction": 0.1}, "dropped_fraction"),
    "kl_cov": ({"top_fraction": 0.1}, "penalized_fraction"),
    "m2po": ({"second_moment": 3.0}, "dropped_fraction"),
}


@pytest.mark.parametrize("loss", PICKING)
def test_tokens_that_a_loss_picks_do_not_depend_on_the_micro_batches(loss: str) -> None:
    options, share = PICKING[loss]
    found = []
    for budget in (64, 100_000):
        config = {"tokens_per_micro_batch": budget, "algorithm": {"loss": {"type": loss, **options}}}
        one = Learner(a_model(), TrainerConfig.model_validate(config), 1.0)
        value, metrics = one.accumulate(a_step(0))
        found.append((value, metrics, [p.grad.clone() for p in one.parameters.values() if p.grad is not None]))
    (value, metrics, gradient), (other, more, again) = found
    assert value == pytest.approx(other, abs=1e-5) and metrics == pytest.approx(more, abs=1e-4)
    assert 0 < metrics[share] <= (0.9 if loss == "m2po" else 0.11)
    for mine, its in zip(gradient, again, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-5, rtol=1e-3)


def test_metrics_of_several_updates_are_a_steps() -> None:
    updates = [
        {"lag/0/share": 1.0, "lag/0/kl": 0.2, "mismatch_max": 1.0, "loss": 1.0},
        {"lag/0/share": 0.5, "lag/3/share": 0.5, "lag/0/kl": 0.4, "mismatch_max": 3.0, "loss": 2.0},
        {"loss": 3.0},
    ]
    found = mean_metrics(updates)
    assert found == pytest.approx(
        {"lag/0/share": 0.75, "lag/3/share": 0.25, "lag/0/kl": 0.3, "mismatch_max": 3.0, "loss": 2.0}
    )
