"""A critic that is an adapter: what learns, what a checkpoint of it has, and what a config may say of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForTokenClassification, Qwen3Config, Qwen3ForCausalLM

from penstock.pipeline.config import ConfigError, load
from penstock.pipeline.models.tiny import make_tokenizer
from penstock.pipeline.preflight.lora import look
from penstock.pipeline.preflight.report import Report
from penstock.pipeline.resources.host import host_needs
from penstock.pipeline.resources.memory import critic_gib
from penstock.pipeline.run.evaluate import evaluate
from penstock.pipeline.tools.merge import merge
from penstock.services.critic.config import CriticConfig
from penstock.services.critic.learner import CriticLearner
from penstock.services.learning import checkpoint
from penstock.services.learning.config import CheckpointConfig, Penalties
from penstock.services.modeling.lora import Adapter
from penstock.services.modeling.parallel.start import load_trainable
from penstock.services.modeling.parallel.world import World
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.gpus import GIB
from tests.conftest import TINY
from tests.critic.test_learner import CPU, policy, valued
from tests.critic.test_learner import critic_of as whole_critic_of
from tests.e2e.runs import QUICKSTART, ROOT
from tests.trainer.steps import a_step

__all__ = ["policy"]
HEAD = ("score.weight", "score.bias")
CONFIGS = ROOT / "configs"


def critic_of(path: Path, saved: Path | None = None, dtype: str = "float32", **lora: Any) -> CriticLearner:
    config = CriticConfig.model_validate({"optimizer": {"lr": 3e-2}, "lora": {"rank": 4, "alpha": 8} | lora})
    adapter = Adapter.of(config.lora, saved, "critic.lora")
    model = load_trainable(str(path), World(CPU), CPU, dtype, "value", adapter)
    return CriticLearner(model, config, 50, 1.0, 1.0, Penalties())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapter_and_head_learn_what_answers_are_worth_and_nothing_else_does(policy: Path, dtype: str) -> None:
    learner, step = critic_of(policy, dtype=dtype), a_step(0)
    assert all(not values.any() for values in learner.values(step)), "it begins with values of zero"
    assert {name for name in learner.parameters if ".lora_" not in name} == {*HEAD}
    frozen = {name: p.detach().clone() for name, p in learner.model.named_parameters() if not p.requires_grad}
    first = learner.train(valued(learner, step))
    for _ in range(60):
        last = learner.train(valued(learner, step))
    assert last["critic_loss"] < 0.5 * first["critic_loss"]
    assert all(torch.equal(p, frozen[name]) for name, p in learner.model.named_parameters() if name in frozen)
    assert all(p.dtype == torch.float32 for p in learner.parameters.values())


def test_a_checkpoint_goes_on_as_it_was_and_is_pefts_own(policy: Path, tmp_path: Path) -> None:
    learner = critic_of(policy)
    for seed in range(3):
        learner.train(valued(learner, a_step(seed)))
    saver = checkpoint.Saver(learner, make_tokenizer(set("ab")), tmp_path / "checkpoints", CheckpointConfig(keep=2))
    path = saver.begin().result()
    saver.close()
    assert all(".lora_" in name or name.endswith(HEAD) for name in load_file(path / "adapter_model.safetensors"))
    other = critic_of(policy, path)
    checkpoint.restore(other, path)
    for one in (learner, other):
        one.train(valued(one, a_step(4)))
    assert all(torch.equal(other.parameters[name], value) for name, value in learner.parameters.items())

    base = AutoModelForTokenClassification.from_pretrained(policy, num_labels=1)
    merge(path, tmp_path / "merged")
    whole = AutoModelForTokenClassification.from_pretrained(tmp_path / "merged")
    step = a_step(5)
    values = critic_of(policy, path).values(step)
    assert any(each.any() for each in values)
    for theirs in (PeftModel.from_pretrained(base, path).eval(), whole.eval()):
        for trajectory, mine in zip(step.trajectories, values, strict=True):
            with torch.no_grad():
                said = theirs(torch.from_numpy(trajectory.tokens)[None]).logits[0, :, 0]
            wanted = said[:-1] * torch.from_numpy(trajectory.loss_mask)[1:]  # of the state before a token
            torch.testing.assert_close(torch.from_numpy(mine)[1:], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_a_whole_critic_is_merged_with_its_head_and_is_nothing_to_evaluate(tied: bool, tmp_path: Path) -> None:
    Qwen3ForCausalLM(Qwen3Config(**TINY | {"tie_word_embeddings": tied})).save_pretrained(tmp_path / "policy")
    learner = whole_critic_of(tmp_path / "policy")
    learner.train(valued(learner, a_step(0)))
    saver = checkpoint.Saver(learner, make_tokenizer(set("ab")), tmp_path / "checkpoints", CheckpointConfig(keep=2))
    path = saver.begin().result()
    saver.close()
    merge(path, tmp_path / "merged")
    found = AutoModelForTokenClassification.from_pretrained(tmp_path / "merged")
    assert torch.equal(found.score.weight, learner.parameters["score.weight"]) and found.score.weight.any()
    with pytest.raises(ConfigError, match="is a critic, which answers nothing"):
        evaluate(Console(), str(path), QUICKSTART, [])


def test_a_mistake_names_the_critics_key(policy: Path, tmp_path: Path) -> None:
    (adapter := tmp_path / "adapter").mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 4}')
    save_file({}, adapter / "adapter_model.safetensors")
    for lora, said in (
        ({"targets": ["nothing"]}, r"critic\.lora\.targets: no layer is called nothing; linear ones are .*down_proj"),
        ({"targets": ["score"]}, r"critic\.lora\.targets: score, the head, learns whole"),
        ({"targets": ["q_proj"], "exclude": ["q_proj"]}, r"critic\.lora\.exclude: nothing is left"),
        ({"saved": adapter}, r"^critic\.lora: [^:]*safetensors has no .*lora_A\.weight: other targets"),
    ):
        with pytest.raises(SetupError, match=said):
            critic_of(policy, **lora)
    given = [f"model={{type: pretrained, path: {policy}}}", "critic.lora={targets: [nothing], start: nowhere}"]
    config, report = load(CONFIGS / "ppo.yaml", given), Report()
    look(config, report)
    assert [problem.split(":")[0] for problem in report.problems] == ["critic.lora.start", "critic.lora.targets"]


def test_it_needs_the_memory_of_what_learns() -> None:
    given = ["trainer.algorithm.advantage.type=gae", "critic.gradient_checkpointing=true"]
    configs = [load(CONFIGS / "grpo-8b.yaml", [*given, *more]) for more in ([], ["critic.lora.rank=16"])]
    whole, adapted = (critic_gib(config, 80.0) for config in configs)
    assert whole and adapted and 8.2 * 2 < adapted * GIB / 1e9 < 30 < 8.2 * 16 < whole * GIB / 1e9
    odd = "critic.lora={targets: ['*'], exclude: [score], quantize: nf4}"  # would have a policy's head among them
    assert (critic_gib(load(CONFIGS / "grpo-8b.yaml", [*given, odd]), 80.0) or 99) < adapted
    needs = [host_needs(config) for config in configs]
    assert needs[0] and needs[1] and needs[1].critic < 0.05 * needs[0].critic
