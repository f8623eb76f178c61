"""Models whose code comes with them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.pipeline.config import Config, load
from penstock.pipeline.models.tiny import make_tokenizer
from penstock.pipeline.preflight import model as models
from penstock.pipeline.preflight.report import Report
from penstock.services.learning.checkpoint import Saver
from penstock.services.learning.config import CheckpointConfig
from penstock.services.modeling.load import ModelError, load_config, load_model, load_tokenizer
from penstock.services.modeling.logprobs import layout_of
from penstock.services.modeling.parallel.start import load_trainable
from penstock.services.modeling.parallel.world import World
from penstock.services.rollout.engines.torch.fitting import fitting_model
from penstock.services.rollout.engines.torch.recomputed import RecomputedModel
from penstock.services.runtime import own_code as own
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from tests import own_code
from tests.trainer.steps import a_step

CPU = torch.device("cpu")
ALPHABET = "abcdefghijklmnopqrstuvwxyz =,"


@pytest.fixture(autouse=True)
def trusting() -> Iterator[None]:
    own.trust(True)
    yield
    own.trust(False)


def test_it_learns_and_a_checkpoint_of_it_is_whole(tmp_path: Path) -> None:
    """Also where its folder is gone: its code is in the checkpoint, and what that computes as it is made is right."""
    path = own_code.write(tmp_path / "model")
    make_tokenizer(set(ALPHABET)).save_pretrained(path)
    learner = Learner(load_trainable(str(path), World(CPU), CPU, "float32"), TrainerConfig(), 1.0)
    assert layout_of(learner.model) == "apart"
    assert learner.model.layers[1].fade.tolist() == pytest.approx([1 / n for n in range(1, 17)])
    before = {name: value.clone() for name, value in learner.published.items()}
    learner.train(a_step(0))
    assert all(not torch.equal(value, before[name]) for name, value in learner.published.items())
    saved = Saver(learner, load_tokenizer(str(path)), tmp_path / "run", CheckpointConfig(keep=1)).begin().result()
    shutil.rmtree(path)
    again = load_model(str(saved), "float32", CPU)
    ids = torch.from_numpy(np.arange(2, 20))[None]
    with torch.no_grad():
        wanted = learner.model(input_ids=ids).logits
        assert torch.equal(again(input_ids=ids).logits, wanted)
    engine = fitting_model(load_config(str(saved)), 2, 32, torch.float32, CPU, None)
    assert isinstance(engine, RecomputedModel)
    engine.weights = engine.prepare(learner.published)
    slots = [torch.tensor([0])]
    torch.testing.assert_close(engine.prefill(ids, torch.tensor([18]), slots), wanted[:, -1])


def test_nobodys_code_runs_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anybody asked on a terminal; the key is named instead, and whoever loads a config is who says so."""
    path = own_code.write(tmp_path / "model")
    (path / "configuration_own.py").write_text("raise SystemError('it has run')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{type: pretrained, path: {path}}}\nprompts: {{train: {{type: sort}}}}\n")
    report = Report()
    models.look(load(file), report)
    (problem,) = report.problems
    assert "has code of its own" in problem and "set model.trust_remote_code=true" in problem
    load(file, ["model.trust_remote_code=true"])
    with pytest.raises(ModelError, match="it has run"):
        load_config(str(path))


def test_what_cannot_be_called_as_others_are_is_refused(tmp_path: Path) -> None:
    path = own_code.write(tmp_path / "model", "use_cache=False", kind="without_positions")
    with pytest.raises(ModelError, match="the forward of its OwnForCausalLM takes no position_ids"):
        load_trainable(str(path), World(CPU), CPU, "float32")
    path = own_code.write(tmp_path / "other")
    make_tokenizer(set(ALPHABET)).save_pretrained(path)
    told = {"model": {"type": "pretrained", "path": str(path)}, "prompts": {"train": {"type": "sort"}}}
    none, ppo = "or take an advantage without a critic", {"algorithm": {"preset": "ppo"}}
    for trainer, said in (({}, []), ({"gradient_checkpointing": True}, ["set it to false"]), (ppo, [none])):
        report = Report()
        models.look(Config.model_validate(told | {"trainer": trainer}), report)
        assert [problem[-len(said[0]) :] for problem in report.problems] == said if said else not report.problems


def test_where_transformers_knows_a_model_its_code_is_taken(tmp_path: Path) -> None:
    path = own_code.write(tmp_path / "model", kind="qwen3")
    (path / "configuration_own.py").write_text("raise SystemError('it has run')")
    assert type(load_config(str(path))).__name__ == "Qwen3Config"
