"""A reward model, made here, that likes short answers: the policy learns to give them."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, Gemma2ForSequenceClassification, Qwen3Config, Qwen3ForSequenceClassification

from penstock.pipeline.models.tiny import make_tokenizer
from penstock.pipeline.run.summary import steps_of
from penstock.protocols.experience import Group, Prompt
from penstock.services.modeling.reward_model import RewardModel, look_at_head
from penstock.services.runtime.errors import SetupError
from tests.conftest import make_group
from tests.e2e.runs import SHORT, Run, check_promises

LETTERS = "abcdefghij"
LONGEST = 12


def a_text(random: np.random.Generator) -> tuple[str, float]:
    """A prompt with an answer, and what that is worth."""
    letters = "".join(random.choice(list(LETTERS), 6))
    length = int(random.integers(0, LONGEST))
    return f"sort {letters}=" + "".join(random.choice(list(LETTERS), length)), 1 - length / LONGEST


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained for some seconds to tell short answers from long ones."""
    folder, random = tmp_path_factory.mktemp("reward-model"), np.random.default_rng(0)
    tokenizer = make_tokenizer(set(f"{LETTERS}sort ="))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen3ForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        texts, grades = zip(*(a_text(random) for _ in range(64)), strict=True)
        found = model(**tokenizer(list(texts), return_tensors="pt", padding=True, padding_side="right")).logits[:, 0]
        loss = (found - torch.tensor(grades)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.02
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def answered(prompt: str, answers: list[str]) -> Group:
    made = make_group(np.random.default_rng(1), 0)
    for trajectory, text in zip(made.trajectories, answers, strict=True):
        object.__setattr__(trajectory, "text", text)
    return Group(0, Prompt(index=0, text=prompt), made.trajectories)


def test_grades_do_not_depend_on_the_batch(reward_model: Path) -> None:
    group = answered("sort fjabce=", ["", "abc", "abcdefgh", "j"])
    found = [
        RewardModel(str(reward_model), "liked", "cpu", "float32", tokens).score_group(group, {})["liked"]
        for tokens in (8192, 40, 1)
    ]
    assert found[0].dtype == np.float32 and found[0].shape == (4,)
    np.testing.assert_allclose(found[1:], np.broadcast_to(found[0], (2, 4)), atol=1e-5)
    assert list(np.argsort(-found[0])) == [0, 3, 1, 2], "the shorter the better"


@pytest.mark.parametrize("padding", [None, -1, "pad"])
def test_the_grade_is_what_the_model_says_of_one_text_alone(tmp_path: Path, padding: Any) -> None:
    tokenizer = make_tokenizer(set(LETTERS))
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + '<eos>' }}{% endfor %}"
    if padding != "pad":
        tokenizer.pad_token = None
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_labels=1,
        pad_token_id=tokenizer.pad_token_id if padding == "pad" else None,
    )  # fmt: skip
    model = Qwen3ForSequenceClassification(config).eval()
    torch.nn.init.normal_(model.score.weight)
    model.config.pad_token_id = padding if padding == -1 else config.pad_token_id
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    group = answered("abc", ["", "a", "bcdefgh", "jj"])
    with torch.no_grad():
        alone = [
            model(tokenizer(f"abc<eos>{each.text}<eos>", return_tensors="pt")["input_ids"]).logits.item()
            for each in group.trajectories
        ]
    found = RewardModel(str(tmp_path), "liked", "cpu", "float32").score_group(group, {})["liked"]
    np.testing.assert_allclose(found, alone, atol=1e-5)


def test_a_model_with_other_labels_is_refused(reward_model: Path, tmp_path: Path) -> None:
    model = Qwen3ForSequenceClassification.from_pretrained(reward_model, num_labels=2, ignore_mismatched_sizes=True)
    model.save_pretrained(tmp_path)
    with pytest.raises(SetupError, match="has 2 labels; a reward model has one"):
        RewardModel(str(tmp_path), device="cpu")


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ([], "have no score.weight, which Qwen3ForSequenceClassification grades with: it would be drawn at random"),
        (["v_head.weight"], "have no score.weight, .* with; they have v_head.weight, which it does not read"),
        (["score.weight", "score.bias"], "have score.bias, which .* does not read: grades would be others"),
        (["score.weight", "lm_head.weight"], None),
    ],
)
def test_a_model_without_the_head_that_it_was_trained_with_is_refused(
    reward_model: Path, tmp_path: Path, head: list[str], said: str | None
) -> None:
    """Before the run, too, by the names in its files."""
    path = shutil.copytree(reward_model, tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    score = weights.pop("score.weight")
    save_file(weights | {name: score.clone() for name in head}, path / "model.safetensors")
    for look in (partial(RewardModel, device="cpu"), partial(look_at_head, key="options.path")):
        with pytest.raises(SetupError, match=f"^options.path: the files of .* {said}") if said else nullcontext():
            look(str(path))


def test_a_model_whose_attention_is_drawn_below_a_cap_grades_as_its_authors_code(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(set(LETTERS))
    config = Gemma2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_labels=1, pad_token_id=tokenizer.pad_token_id,
        attn_logit_softcapping=1.0, query_pre_attn_scalar=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma2ForSequenceClassification._from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    group = answered("abc", ["", "a", "bcdefgh", "jj"])
    with torch.no_grad():
        alone = [
            model(tokenizer(f"abc{each.text}", return_tensors="pt")["input_ids"]).logits.item()
            for each in group.trajectories
        ]
    found = RewardModel(str(tmp_path), "liked", "cpu", "float32").score_group(group, {})["liked"]
    np.testing.assert_allclose(found, alone, atol=1e-5)


@pytest.mark.learning
def test_the_policy_learns_what_the_reward_model_likes(reward_model: Path, tmp_path: Path) -> None:
    options = f"{{path: {reward_model}, column: liked, device: cpu, dtype: float32}}"
    overrides = [
        "trainer.steps=30", "gate.groups_per_step=16", "prompts.eval_size=16", "trainer.algorithm.kl.coefficient=0",
        f"scorers={{liked: {{scorer: reward_model, columns: {{liked: trajectory}}, options: {options}}}}}",
        "reward={functions: [{function: exact_match, weight: 0}], columns: {liked: 1.0}}",
    ]  # fmt: skip
    run = Run(tmp_path, [*SHORT, "rollout.sampling.n=8", "trainer.optimizer.lr=1.0e-3", *overrides])
    summary = run.wait()
    check_promises(summary)
    rows = steps_of(run.folder)
    assert all(row["reward"] == pytest.approx(row["liked"], abs=1e-6) for row in rows)
    assert np.mean([row["response_tokens"] for row in rows[-5:]]) < 0.6 * rows[0]["response_tokens"]
    assert summary["reward_last"] > summary["reward_first"] + 0.1
    assert summary["eval_after"] > summary["eval_before"], "evaluation prompts are graded too"
