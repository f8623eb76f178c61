"""The policy as its own teacher: what it is shown, and that its numbers are those of the model that has seen it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from penstock.pipeline.models.tiny import make_tokenizer
from penstock.protocols.experience import UNSAMPLED, Prompt, Trajectory
from penstock.services.learning import checkpoint
from penstock.services.learning.batch import TrainingBatch
from penstock.services.learning.config import CheckpointConfig
from penstock.services.trainer.advantage_config import SelfDistillationAdvantage
from penstock.services.trainer.algorithms.advantages.distillation import self_distillation
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from penstock.services.trainer.self_teacher import SelfTeacher
from penstock.services.turns.tokenizer import Tokenizer
from tests.trainer.rank_program import a_model

TEMPLATE = "{solution}:{prompt}"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    make_tokenizer(set("abcdefgh=:<>/think ")).save_pretrained(tmp_path)
    return Tokenizer(str(tmp_path))


def answer(tokenizer: Tokenizer, prompt: str, text: str) -> Trajectory:
    asked, said = tokenizer.encode_text(prompt), tokenizer.encode_text(text)
    tokens = np.concatenate([asked, said])
    mask = (np.arange(len(tokens)) >= len(asked)).astype(np.uint8)
    logprobs = np.where(mask == 1, -1.0, 0.0).astype(np.float32)
    return Trajectory(tokens, mask, logprobs, np.where(mask == 1, 0, UNSAMPLED).astype(np.int32), text=text)


def a_step(tokenizer: Tokenizer, prompts: list[Prompt], texts: list[list[str]], rewards: list[float]) -> TrainingBatch:
    asked = [p for p, said in zip(prompts, texts, strict=True) for _ in said]
    answers = [answer(tokenizer, p.text or "", t) for p, said in zip(prompts, texts, strict=True) for t in said]
    groups = np.repeat(np.arange(len(prompts)), [len(said) for said in texts])
    values = {"reward": np.array(rewards, np.float32)}
    return TrainingBatch(answers, groups, np.arange(len(answers)), values, {}, prompts=tuple(asked))


def teacher(tokenizer: Tokenizer, **given: Any) -> SelfTeacher:
    return SelfTeacher(SelfDistillationAdvantage.model_validate({"template": TEMPLATE, **given}), tokenizer)


def seen(tokenizer: Tokenizer, step: TrainingBatch, **given: Any) -> dict[int, str]:
    """What each answer's teacher has read, the answer included."""
    found = teacher(tokenizer, **given).retell(step, 1000)
    return {place: tokenizer.decode([t.tokens.tolist()])[0] for place, t in found.items()}


def test_each_answer_is_shown_the_best_other_one_of_its_group(tokenizer: Tokenizer) -> None:
    prompts = [Prompt(index=0, text="ab="), Prompt(index=1, text="cd=")]
    step = a_step(tokenizer, prompts, [["a", "b", "ab"], ["c", "d", "e"]], [0.0, 1.0, 2.0, 1.0, float("nan"), 0.5])
    assert seen(tokenizer, step) == {0: "ab:ab=a", 1: "ab:ab=b", 2: "b:ab=ab", 4: "c:cd=d", 5: "c:cd=e"}
    assert seen(tokenizer, step, success=3.0) == {}, "none is good enough"
    assert len(seen(tokenizer, step, longest=6)) == 2, "what is too long is left out"


def test_the_truth_is_shown_where_that_is_asked_for_and_thoughts_are_not(tokenizer: Tokenizer) -> None:
    prompts = [Prompt(index=0, text="ab=", truth="ba"), Prompt(index=1, text="cd=", truth=None)]
    step = a_step(tokenizer, prompts, [["a"], ["c"]], [0.0, 0.0])
    assert seen(tokenizer, step, shows="truth") == {0: "ba:ab=a"}
    thought = a_step(tokenizer, prompts[:1], [["a", "<think>b a</think> ba"]], [0.0, 1.0])
    assert seen(tokenizer, thought) == {0: "ba:ab=a"}
    assert seen(tokenizer, thought, thinking=True) == {0: "<think>b a</think> ba:ab=a"}
    begun = a_step(tokenizer, prompts[:1], [["a", "b a</think> ba"]], [0.0, 1.0])
    assert seen(tokenizer, begun) == {0: "ba:ab=a"}, "the template has begun the thought"
    amid = a_step(tokenizer, prompts[:1], [["a", "b <think>a</think>a"]], [0.0, 1.0])
    assert seen(tokenizer, amid) == {0: "b a:ab=a"}, "what stands before one stays"


def test_in_a_chat_it_is_shown_in_the_last_message(tmp_path: Path) -> None:
    plain = make_tokenizer(set("abcdefgh=:<>/think "))
    plain.chat_template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    plain.save_pretrained(tmp_path)
    chat = Tokenizer(str(tmp_path))
    messages = [{"role": "system", "content": "h"}, {"role": "user", "content": "ab="}]
    prompt = Prompt(index=0, messages=messages, truth="ba")
    step = a_step(chat, [Prompt(index=0, text="<h><ab=>", truth="ba")], [["a"]], [0.0])
    step = TrainingBatch(step.trajectories, step.groups, step.sessions, step.values, {}, prompts=(prompt,))
    assert seen(chat, step, shows="truth") == {0: "<h><ba:ab=>a"}


def test_the_gain_is_that_of_the_model_which_has_read_it(tokenizer: Tokenizer) -> None:
    """Against plain forward passes over each sequence; also with micro-batches of one row."""
    prompts = [Prompt(index=0, text="ab="), Prompt(index=1, text="cdef=")]
    step = a_step(tokenizer, prompts, [["a", "ab", "hgf"], ["c", "ed"]], [0.0, 1.0, 0.5, 0.0, 0.0])
    chosen = {"algorithm": {"preset": "sdpo", "advantage": {"template": TEMPLATE, "bound": 2.0, "teacher_rate": 1.0}}}
    for budget in (8192, 8):
        config = TrainerConfig.model_validate({**chosen, "tokens_per_micro_batch": budget})
        assert isinstance(config.algorithm.advantage, SelfDistillationAdvantage)
        learner = Learner(a_model(), config, 1.0, teacher=SelfTeacher(config.algorithm.advantage, tokenizer))
        found, metrics = learner._advantages(step)
        assert metrics["taught_rows"] == pytest.approx(2 / 5)  # the good answer has no other to see
        for row, text in ((0, "a"), (2, "hgf")):
            said = []
            for before in ("ab=", "ab:ab="):
                ids = torch.from_numpy(answer(tokenizer, before, text).tokens.astype(np.int64))
                logs = learner.model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
                said.append(logs[-len(text) :])
            wanted = (said[1] - said[0]).clamp(-2, 2).detach()
            torch.testing.assert_close(found[row, 3 : 3 + len(text)], wanted, rtol=1e-4, atol=1e-4)
        assert not found[[1, 3, 4]].any(), "who is shown nothing learns nothing"


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_the_teacher_follows_slowly_and_a_checkpoint_has_it(rate: float, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Its weights are the running mean, step by step; a learner that goes on from a checkpoint arrives at the bits."""
    step = a_step(tokenizer, [Prompt(index=0, text="ab=")], [["a", "ab", "hgf"]], [0.0, 1.0, 0.5])
    given = {"preset": "sdpo", "advantage": {"template": TEMPLATE, "teacher_rate": rate}}
    config = TrainerConfig.model_validate({"algorithm": given, "optimizer": {"lr": 1e-2}})

    def made(model: Any) -> Learner:
        assert isinstance(config.algorithm.advantage, SelfDistillationAdvantage)
        return Learner(model, config, 1.0, teacher=SelfTeacher(config.algorithm.advantage, tokenizer))

    learner = made(a_model())
    name, parameter = next(iter(learner.parameters.items()))
    wanted, read = parameter.detach().clone(), []
    for _ in range(2):
        learner.train(step, lambda: read.append(parameter.detach().clone()))
        assert torch.equal(read[-1], read[-2]), "nobody reads the teacher's weights for the policy's"
        wanted = wanted.lerp(parameter.detach(), rate)
        torch.testing.assert_close(learner.optimizer.state[parameter]["average"], wanted)
    saver = checkpoint.Saver(learner, tokenizer.plain, tmp_path / "checkpoints", CheckpointConfig(keep=1))
    path = saver.begin().result()
    saver.close()
    again = made(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    checkpoint.restore(again, path)
    learner.train(step)
    again.train(step)
    for name, parameter in learner.parameters.items():
        assert torch.equal(parameter, again.parameters[name]), name
        same = [found.optimizer.state[found.parameters[name]]["average"] for found in (learner, again)]
        assert torch.equal(*same), name
    plain = TrainerConfig.model_validate({"optimizer": {"lr": 1e-2}})
    untaught = Learner(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), plain, 1.0)
    checkpoint.restore(untaught, path)
    untaught.train(step)
    states = untaught.optimizer.state.values()
    assert states and not any("average" in state for state in states), "nobody follows it, so it would be stale"


def test_a_share_of_it_is_grpos() -> None:
    mask, groups = torch.ones(2, 3, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    rewards = torch.tensor([[0, 0, 1.0], [0, 0, 0]], dtype=torch.float64)
    policy, taught = torch.zeros(2, 3), torch.ones(2, 3)
    found = self_distillation(rewards, mask, groups, policy, taught, bound=0.5, group_share=0.25)
    wanted = 0.75 * 0.5 + 0.25 * torch.tensor([[0.5**0.5], [-(0.5**0.5)]], dtype=torch.float64)
    torch.testing.assert_close(found, wanted.expand(2, 3), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("template", ["{prompt}", "{solution}{prompt}{other}", "{prompt}{solution", "{0}"])
def test_a_template_that_shows_nothing_is_an_error(template: str) -> None:
    with pytest.raises(ValidationError, match=r"\{solution\}"):
        SelfDistillationAdvantage(template=template)
