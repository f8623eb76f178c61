"""The entropy bonus, steered to a target: by its rule, in the loss, in a checkpoint, and by a run that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from penstock.services.learning import checkpoint
from penstock.services.learning.config import CheckpointConfig
from penstock.services.trainer.algorithm_config import AlgorithmConfig
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.entropy_control import bonus_of_update, steer
from penstock.services.trainer.learner import Learner
from tests.trainer.rank_program import a_model
from tests.trainer.steps import Tokenizer, a_step

CONTROL = {"target": 0.5, "step": 0.01, "low": 0.005, "high": 0.03}


def config(bonus: float = 0.01, control: dict[str, float] | None = CONTROL) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"entropy_bonus": bonus, "entropy_control": control})


def learner(frozen: int = 0, parts: int = 1, **algorithm: Any) -> Learner:
    given = {"algorithm": algorithm, "mini_batches": parts, "optimizer": {"lr": 1e-3}}
    return Learner(a_model(), TrainerConfig.model_validate(given), 1.0, frozen_steps=frozen)


def test_it_grows_below_the_target_falls_above_and_counts_below_alone() -> None:
    state: dict[str, float] = {}
    found = []
    for entropy in (0.4, 0.5, 0.3, 0.6, 0.7, 0.8, 0.4, float("nan"), 0.4):
        found.append(bonus_of_update(config(), state))
        steer(config(), state, {"entropy": entropy})
    assert found == pytest.approx([0, 0.02, 0.03, 0.03, 0, 0, 0, 0.015, 0.015])
    steer(config(), state, {})  # nothing was sampled
    assert bonus_of_update(config(), state) == pytest.approx(0.025)


def test_a_run_that_goes_on_with_another_bonus_begins_with_that_and_with_other_bounds_keeps_within() -> None:
    state = {"entropy_bonus": 0.03, "entropy_bonus_began": 0.01, "entropy_last": 0.1}
    assert bonus_of_update(config(), dict(state)) == 0.03
    assert bonus_of_update(config(control=CONTROL | {"high": 0.02}), dict(state)) == 0.02
    assert bonus_of_update(config(0.02), other := dict(state)) == 0.0, "as if there had been no update yet"
    assert other == {"entropy_bonus_began": 0.02}
    assert bonus_of_update(config(control=None), state) == 0.01 and not state
    with pytest.raises(ValidationError, match="low=0.03 is not below high=0.03"):
        config(control=CONTROL | {"low": 0.03})


def test_what_it_has_become_is_in_the_loss_and_in_the_checkpoint(tmp_path: Path) -> None:
    always = {"target": 100.0, "step": 0.1}
    one, plain, again = learner(entropy_control=always), learner(entropy_bonus=0.1), learner(entropy_control=always)
    assert one.train(a_step(0))["entropy_bonus"] == 0.0
    saver = checkpoint.Saver(one, Tokenizer(), tmp_path, CheckpointConfig(keep=1))
    path = saver.begin().result()
    saver.close()
    for each in (again, plain):
        each.model.load_state_dict(one.model.state_dict())  # which a run loads from the checkpoint's folder
        checkpoint.restore(each, path)
    found, redone, constant = (each.train(a_step(1)) for each in (one, again, plain))
    assert found["entropy_bonus"] == 0.1 and redone == found and redone["loss"] == constant["loss"]
    for name, parameter in one.parameters.items():
        assert torch.equal(parameter, again.parameters[name]) and torch.equal(parameter, plain.parameters[name])
    assert again.state == one.state and one.state["entropy_bonus"] == pytest.approx(0.2)
    assert not plain.state.keys() & {"entropy_bonus", "entropy_last"} and "entropy_bonus" not in constant


def test_each_update_of_a_step_is_steered_and_none_while_the_policy_stands_still() -> None:
    always = {"target": 100.0, "step": 0.1}
    assert learner(parts=3, entropy_control=always).train(a_step(0))["entropy_bonus"] == pytest.approx(0.1)
    still = learner(frozen=1, entropy_control=always)
    still.train(a_step(0))
    assert not still.state and still.train(a_step(1))["entropy_bonus"] == 0.0
