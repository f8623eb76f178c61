"""`trainer.freeze`: what stands still, and patterns that fit nothing. tests/trainer/test_shapes.py has ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from penstock.pipeline.preflight.model import _check_frozen
from penstock.services.learning import checkpoint
from penstock.services.learning.config import CheckpointConfig
from penstock.services.modeling.freezing import freeze
from penstock.services.modeling.parallel.world import World
from penstock.services.runtime.errors import SetupError
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from penstock.services.trainer.rank_setup import load_policy
from tests import families
from tests.trainer.rank_program import a_mixture, a_model
from tests.trainer.steps import Tokenizer, a_step

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


def test_a_stage_in_which_nothing_learns_is_named_before_a_run(tmp_path: Path) -> None:
    a_model(num_hidden_layers=4).save_pretrained(tmp_path)
    lower = ["model.embed_tokens.*", "model.layers.[01].*"]

    def check(frozen: list[str], stages: int) -> None:
        trainer = TrainerConfig.model_validate({"ranks": 2, "pipeline_parallel": stages, "freeze": frozen})
        _check_frozen(str(tmp_path), trainer)

    check(lower[1:], 2)  # the first stage has the embedding
    check(lower, 1)
    with pytest.raises(SetupError, match=r"nothing in layers 0 to 1, .* trainer.pipeline_parallel=2"):
        check(lower, 2)


def test_towers_that_learn_and_are_all_frozen_are_refused(tmp_path: Path) -> None:
    families.write("qwen3_vl", tmp_path)
    trainer = {"train_towers": True, "freeze": ["model.visual.blocks.*", "model.visual.p*_embed.*"]}
    _check_frozen(str(tmp_path), TrainerConfig.model_validate(trainer))  # the mergers learn
    with pytest.raises(SetupError, match="trainer.freeze leaves nothing of the towers that trainer.train_towers"):
        _check_frozen(str(tmp_path), TrainerConfig.model_validate(trainer | {"freeze": ["model.visual.*"]}))


def test_what_is_tied_and_stands_still_is_saved_once(tmp_path: Path) -> None:
    a_model(tie_word_embeddings=True).save_pretrained(tmp_path)
    config = TrainerConfig.model_validate({"freeze": PATTERNS[:1]})
    world = World(torch.device("cpu"))
    learner = Learner(load_policy(str(tmp_path), str(tmp_path), world, "float32", config), config, 1.0, world)
    saver = checkpoint.Saver(learner, Tokenizer(), tmp_path / "checkpoints", CheckpointConfig(keep=1))
    path = saver.begin().result()
    saver.close()
    with safe_open(path / "model.safetensors", framework="pt") as file:
        assert {name for name in file.keys() if name.endswith(("lm_head.weight", "embed_tokens.weight"))} == {  # noqa: SIM118
            "model.embed_tokens.weight"
        }
