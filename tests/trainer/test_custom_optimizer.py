"""An optimizer by its name: torch's own numbers, exact checkpoints, and clear refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import Qwen3Config, Qwen3ForCausalLM

from penstock.pipeline.config import load
from penstock.pipeline.resources.trainer_memory import state_bytes
from penstock.services.learning.checkpoint import AVERAGE, Saver, restore
from penstock.services.learning.config import CheckpointConfig
from penstock.services.learning.custom_optimizer import CPU, kept_by
from penstock.services.learning.optimizer import is_eight_bit, keeps_on_device
from penstock.services.learning.optimizer_config import OptimizerConfig
from penstock.services.modeling.parallel.start import load_trainable
from penstock.services.modeling.parallel.world import World
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.plugins import UserCodeError
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from penstock.services.trainer.weight_average import WeightAverage
from tests.conftest import TINY
from tests.trainer.steps import Tokenizer, a_step
from tests.trainer.test_checkpoint import a_learner, continues_exactly

HERE = "tests.trainer.test_custom_optimizer"
SGD = {"type": "custom", "name": "torch.optim:SGD", "lr": 1e-2}


class Counting(torch.optim.Optimizer):
    """Keeps a number of Python's, and a mean."""

    def __init__(self, params: Any, lr: float, rate: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "rate": rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                state = self.state[each]
                state["times"] = state.get("times", 0) + 1
                assert isinstance(state["times"], int), "as it was"
                mean = state.setdefault("mean", torch.zeros_like(each))
                mean.lerp_(each.grad, group["rate"])
                each.add_(mean, alpha=-group["lr"] / state["times"])


class Together(Counting):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1


class Rows(Counting):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for each in self.param_groups[0]["params"]:
            self.state[each]["rows"] = torch.zeros(each.shape[0])


class Alone(Counting):
    """Keeps a number of its own."""

    count = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.count = getattr(self, "count", 0) + 1


class Late(Counting):
    """Keeps more from the tenth step on."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None and self.state[each]["times"] >= 10:
                    self.state[each]["slow"] = torch.zeros_like(each)


class Product(Counting):
    """Keeps a fraction of Python's, which fp32 has not."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    state = self.state[each]
                    state["product"] = state.get("product", 1.0) * 0.97
                    each.mul_(1 - 1e-3 * state["product"] ** 60)


class Raises(Counting):
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("it wants a closure")


NAMED: dict[str, dict[str, Any]] = {
    "sgd": SGD,
    "momentum": {**SGD, "options": {"momentum": 0.9, "nesterov": True}, "weight_decay": 0.1},
    "nadam": {"type": "custom", "name": "torch.optim:NAdam", "options": {"foreach": False}},
    "fused": {"type": "custom", "name": "torch.optim:AdamW", "options": {"amsgrad": True, "fused": True}},
    "product": {"type": "custom", "name": f"{HERE}:Product"},
    "asgd": {"type": "custom", "name": "torch.optim:ASGD"},
    "own": {"type": "custom", "name": f"{HERE}:Counting", "options": {"rate": 0.25}},
}


@pytest.mark.parametrize("kind", NAMED)
def test_training_continues_as_if_it_had_not_stopped(kind: str, tmp_path: Path) -> None:
    continues_exactly(tmp_path, **NAMED[kind])


@pytest.mark.parametrize("offload", [False, True])
def test_a_step_is_torchs_own(offload: bool) -> None:
    torch.manual_seed(0)
    learner = a_learner(Qwen3ForCausalLM(Qwen3Config(**TINY)), offload, **NAMED["momentum"])
    assert keeps_on_device(learner.optimizer) and not is_eight_bit(learner.optimizer)
    torch.manual_seed(0)
    plain = Learner(Qwen3ForCausalLM(Qwen3Config(**TINY)), TrainerConfig(), 1.0)
    matrices = [p for name, p in plain.parameters.items() if p.ndim > 1]
    vectors = [p for p in plain.parameters.values() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    theirs = torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True)
    plain.optimizer = theirs
    plain._learning = learner._learning
    for seed in range(3):
        learner.train(a_step(seed)), plain.train(a_step(seed))
    for name, parameter in learner.parameters.items():
        torch.testing.assert_close(parameter, plain.parameters[name], rtol=1e-6, atol=1e-7, msg=name)


def test_what_it_keeps_is_counted() -> None:
    trained = 1000.0
    found = {kind: state_bytes(OptimizerConfig.model_validate(NAMED[kind]), trained, 0) for kind in NAMED}
    assert found == {
        "sgd": 4000,
        "momentum": 8000,
        "nadam": 12000,
        "fused": 16000,
        "own": 8000,
        "product": 8000,
        "asgd": 8000,
    }


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        (f"{HERE}:Together", {}, "keeps 'k' of all parameters together"),
        (f"{HERE}:Alone", {}, "keeps 'count' of all parameters together"),
        (f"{HERE}:Rows", {}, r"keeps 'rows', \[64\] of torch.float32, of a parameter \[64, 65\]"),
        ("torch.optim:Muon", {}, "cannot change a parameter|cannot be made"),
        ("torch.optim:SGD", {"weight_decay": 0.1}, r"weight_decay is a key of its own; set trainer\.optimizer\."),
        (f"{HERE}:Raises", {}, "it wants a closure"),
        ("torch.optim:LBFGS", {}, "LBFGS doesn't support per-parameter options"),
        ("torch.optim:Adafactor", {}, "keeps 'row_var'"),
        ("torch.optim:SGDD", {}, "cannot load 'torch.optim:SGDD'"),
        ("torch.nn:Linear", {}, "no class of torch.optim.Optimizer's"),
        ("torch.optim:SGD", {"moment": 1}, "cannot be made with them"),
        ("torch.optim:SGD", {"momentum": -1}, "Invalid momentum"),
    ],
)
def test_what_cannot_be_saved_is_refused(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(SetupError, match=says):
        kept_by(OptimizerConfig(type="custom", name=name, options=options), "trainer.optimizer")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"type": "custom"}, "wants the class as name"),
        ({"name": "torch.optim:SGD"}, "name is a key of type=custom alone"),
        ({**SGD, "betas": [0.9, 0.9]}, "betas is a key of type=adamw and muon alone"),
        ({**SGD, "moments": "8bit"}, "moments is a key of type=adamw alone"),
    ],
)
def test_keys_of_other_types_are_told(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        OptimizerConfig.model_validate(given)


def test_decay_that_it_does_not_know_is_told() -> None:
    config = OptimizerConfig(type="custom", name=f"{HERE}:Counting", weight_decay=0.1)
    with pytest.raises(SetupError, match=r"critic\.optimizer\.weight_decay: .*Counting has none"):
        kept_by(config, "critic.optimizer")


def test_what_it_keeps_late_ends_a_save_and_not_a_run_that_goes_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    named = {"type": "custom", "name": f"{HERE}:Late"}
    learner = a_learner(Qwen3ForCausalLM(Qwen3Config(**TINY)), **named)
    saver = Saver(learner, Tokenizer(), tmp_path, CheckpointConfig())
    for seed in range(9):
        learner.train(a_step(seed))
    saver.begin().result()
    learner.train(a_step(9))
    with pytest.raises(SetupError, match=r"Late keeps 'slow' of .* as it did not in its trial"):
        saver.begin()


def test_what_it_raises_in_a_run_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = a_learner(Qwen3ForCausalLM(Qwen3Config(**TINY)), **NAMED["own"])

    def step(closure: Any = None) -> None:
        raise ZeroDivisionError("by what?")

    monkeypatch.setattr(learner.optimizer, "step", step)
    with pytest.raises(UserCodeError, match=r"trainer\.optimizer\.name: .*Counting raised ZeroDivisionError: by what"):
        learner.train(a_step(0))


def test_a_teacher_that_follows_slowly_does_so_where_nothing_is_kept(tmp_path: Path) -> None:
    """And is in checkpoints, as it was."""
    torch.manual_seed(0)
    learner = a_learner(Qwen3ForCausalLM(Qwen3Config(**TINY)), **SGD)
    learner.average = WeightAverage(learner.parameters, learner.optimizer, 0.3)
    for seed in range(3):
        learner.train(a_step(seed))
    path = Saver(learner, Tokenizer(), tmp_path, CheckpointConfig()).begin().result()
    again = a_learner(load_trainable(str(path), World(CPU), CPU, "float32"), **SGD)
    again.average = WeightAverage(again.parameters, again.optimizer, 0.3)
    restore(again, path)
    for name, parameter in learner.parameters.items():
        mean = learner.optimizer.state[parameter][AVERAGE]
        assert torch.equal(mean, again.optimizer.state[again.parameters[name]][AVERAGE]), name
        assert name.endswith("bias") or not torch.equal(mean, parameter), name


def test_its_means_do_not_visit() -> None:
    optimizer = "trainer.optimizer={type: custom, name: 'torch.optim:SGD'}"
    with pytest.raises(Exception, match="offload=optimizer: it knows what AdamW and Muon keep"):
        load(Path("configs/quickstart.yaml"), [optimizer, "trainer.offload=optimizer"])
