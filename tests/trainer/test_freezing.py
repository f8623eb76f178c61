"""`trainer.freeze`: what stands still, and patterns that fit nothing. tests/trainer/test_shapes.py has ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.services.modeling.freezing import freeze
from penstock.services.modeling.parallel.world import World
from penstock.services.runtime.errors import SetupError
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from penstock.services.trainer.rank_setup import load_policy
from tests.trainer.rank_program import a_mixture, a_model
from tests.trainer.steps import a_step

PATTERNS = ["model.embed_tokens.*", "model.layers.0.*"]


def test_what_stands_still_is_published_as_it_came_and_costs_no_state(tmp_path: Path) -> None:
    a_model().save_pretrained(tmp_path)
    config = TrainerConfig.model_validate({"freeze": PATTERNS, "optimizer": {"lr": 0.1}})
    world = World(torch.device("cpu"))
    learner = Learner(load_policy(str(tmp_path), str(tmp_path), world, "float32", config), config, 1.0, world)
    before = {name: weight.detach().clone() for name, weight in learner.published.items()}
    learner.train(a_step(0))
    stands = {name for name in before if torch.equal(before[name], learner.published[name])}
    assert stands == {name for name in before if name.startswith(("model.embed_tokens.", "model.layers.0."))}
    assert learner.parameters.keys() == before.keys() - stands
    assert len(learner.optimizer.state) == len(learner.parameters)


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (["*.gate.*", "*.q_prj.*"], r"no parameter is called like '\*.q_prj.\*'; they have names like model.embed"),
        (["*"], "nothing is left that could learn"),
    ],
)
def test_patterns_that_make_no_sense_are_refused(patterns: list[str], said: str) -> None:
    with pytest.raises(SetupError, match=said):
        freeze(a_mixture(), patterns)
