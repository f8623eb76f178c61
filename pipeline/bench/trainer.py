"""`penstock bench trainer`: a training step on answers of very different lengths, packed; beside the same with padding,
and beside TRL's loss.

All three have the same model, the same trajectories and advantages, and the same room: as many tokens at once as
``--tokens`` says, padding included. Who takes a fixed number of rows at once can take as many as the longest leaves
room for.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from penstock.pipeline.bench.machine import describe
from penstock.pipeline.bench.peers import need_trl
from penstock.protocols.experience import Trajectory
from penstock.services.learning.batch import TrainingBatch
from penstock.services.modeling.load import device_of, load_model
from penstock.services.modeling.parallel.fsdp import forward
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner

PROMPT_TOKENS = (32, 128)
MEDIAN, SPREAD, LONGEST = 120, 1.0, 1024
"""Tokens of an answer: a log-normal distribution's median and standard deviation, cut off."""
CLIP = 0.2
VOCABULARY = 512


@dataclass(frozen=True)
class Micro:
    """Some trajectories below each other, padded: prompts to the left, answers to the right."""

    prompts: torch.Tensor
    """int64 ``[rows, longest prompt]``"""
    prompt_mask: torch.Tensor
    answers: torch.Tensor
    """int64 ``[rows, longest answer]``"""
    answer_mask: torch.Tensor
    advantages: torch.Tensor
    """float32 ``[rows]``"""


def bench(
    console: Console, model_path: str | None, groups: int, n: int, tokens: int, repeats: int, threads: int, trl: bool
) -> None:
    """Prints a table: tokens a second of a whole step (forward, backward, update) of each way, and their ratio."""
    if trl:
        need_trl(console)
    torch.set_num_threads(threads)
    device = device_of("auto")
    with tempfile.TemporaryDirectory() as folder:
        name = model_path or _make_model(folder)
        path = model_path or folder
        learner = Learner(load_model(path, "float32", device), _config(tokens), 1.0)
        plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
    step = _as_sampled(learner, a_step(groups, n, plain.config.vocab_size))
    ways: dict[str, Callable[[], object]] = {
        "penstock, packed": lambda: learner.train(step),
        "padded": _padded(copy.deepcopy(plain), step, tokens),
    }
    if trl:
        ways["TRL"] = _trl(copy.deepcopy(plain), step, tokens, n)
    rates: dict[str, list[float]] = {label: [] for label in ways}
    useful = sum(len(t.tokens) for t in step.trajectories)
    with console.status("training …"):
        for train in ways.values():  # what is compiled or allocated once
            train()
        for _ in range(repeats):  # in turns, so that a noisy machine disturbs all alike
            for label, train in ways.items():
                rates[label].append(useful / _timed(train))
    lengths = [len(t.tokens) for t in step.trajectories]
    title = f"a step of {len(lengths)} trajectories, {useful:,} tokens, longest {max(lengths)}; {tokens} at once"
    table = Table(title=title)
    for column in ("way", "tokens/s (median)", "runs", "packed is … times as fast"):
        table.add_column(column)
    ours = statistics.median(rates["penstock, packed"])
    for label, values in rates.items():
        shown = ", ".join(f"{value:,.0f}" for value in values)
        median = statistics.median(values)
        table.add_row(label, f"{median:,.0f}", shown, f"{ours / median:.2f}")
    console.print(table)
    console.print(f"{name}, float32, {device}, {threads} threads; {describe()}", highlight=False)


def a_step(groups: int, n: int, vocabulary: int, seed: int = 0) -> TrainingBatch:
    """``groups`` of ``n`` trajectories of random tokens; a few of them are many times as long as most."""
    random = np.random.default_rng(seed)
    trajectories = []
    for _ in range(groups):
        prompt = random.integers(0, vocabulary, random.integers(*PROMPT_TOKENS))
        for size in np.clip(random.lognormal(np.log(MEDIAN), SPREAD, n), 1, LONGEST).astype(int):
            sampled = np.r_[np.zeros(len(prompt)), np.ones(size)]
            trajectories.append(
                Trajectory(
                    tokens=np.r_[prompt, random.integers(0, vocabulary, size)].astype(np.int32),
                    loss_mask=sampled.astype(np.uint8),
                    logprobs=np.zeros(len(sampled), np.float32),
                    versions=np.where(sampled == 1, 0, -1).astype(np.int32),
                    text="",
                )
            )
    rewards = random.random(groups * n).astype(np.float32)
    return TrainingBatch(trajectories, np.repeat(np.arange(groups), n), np.arange(groups * n), {"reward": rewards}, {})


def _as_sampled(learner: Learner, step: TrainingBatch) -> TrainingBatch:
    """With the log-probabilities that the model itself gives, as if it had written all of it."""
    found = learner.evaluate(step, lambda rows: forward(learner.model, rows, 1.0))
    pairs = zip(step.trajectories, found, strict=True)
    return replace(step, trajectories=[replace(t, logprobs=logprobs) for t, logprobs in pairs])


def _config(tokens: int) -> TrainerConfig:
    return TrainerConfig.model_validate(
        {
            "tokens_per_micro_batch": tokens,
            "algorithm": {"loss": {"type": "ppo_clip", "clip_low": CLIP, "clip_high": CLIP}},
        }
    )


def _padded(model: Any, step: TrainingBatch, tokens: int) -> Callable[[], None]:
    """The plain way: a fixed number of rows at once, as they come, each padded to the longest of them."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    device = next(model.parameters()).device
    total = sum(t.sampled for t in step.trajectories)

    def train() -> None:
        optimizer.zero_grad(set_to_none=True)
        for micro in _micros(step, tokens, device):
            rows = torch.cat([micro.prompts, micro.answers], 1)
            attention = torch.cat([micro.prompt_mask, micro.answer_mask], 1)
            size = micro.answers.shape[1]
            logits = model(input_ids=rows, attention_mask=attention, logits_to_keep=size + 1).logits[:, :-1].float()
            chosen = logits.log_softmax(-1).gather(-1, micro.answers[..., None])[..., 0]
            ratio = (chosen - chosen.detach()).exp()
            advantage = micro.advantages[:, None]
            losses = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            ((losses * micro.answer_mask).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return train


def _trl(model: Any, step: TrainingBatch, tokens: int, n: int) -> Callable[[], None]:
    """TRL's `GRPOTrainer` computes the loss, of as many rows as the longest leaves room for."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    device = next(model.parameters()).device
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=device.type == "cpu", bf16=False, beta=0.0, epsilon=CLIP, report_to=[],
        loss_type="bnpo", num_generations=n, per_device_train_batch_size=n, max_completion_length=LONGEST,
        gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": "a"}])
    trainer = GRPOTrainer(
        model=model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=arguments,
        train_dataset=data, processing_class=_tokenizer(),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = len(list(_micros(step, tokens, device)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    model.train()

    def train() -> None:
        optimizer.zero_grad(set_to_none=True)
        for micro in _micros(step, tokens, device):
            inputs = {
                "prompt_ids": micro.prompts, "prompt_mask": micro.prompt_mask,
                "completion_ids": micro.answers, "completion_mask": micro.answer_mask,
                "advantages": micro.advantages, "num_items_in_batch": micro.answer_mask.sum(),
            }  # fmt: skip
            trainer._compute_loss(model, inputs).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return train


def _tokenizer() -> Any:
    """Any will do: nothing is encoded."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<pad>")


def _micros(step: TrainingBatch, tokens: int, device: torch.device) -> Iterator[Micro]:
    rewards = step.rewards.reshape(-1, int((step.groups == step.groups[0]).sum()))
    deviation = rewards.std(1, keepdims=True, ddof=1) + 1e-6
    advantages = torch.from_numpy(((rewards - rewards.mean(1, keepdims=True)) / deviation).ravel().copy())
    rows = max(1, tokens // max(len(t.tokens) for t in step.trajectories))
    for start in range(0, len(step.trajectories), rows):
        some = step.trajectories[start : start + rows]
        prompts = [t.tokens[: len(t.tokens) - t.sampled] for t in some]
        answers = [t.tokens[len(t.tokens) - t.sampled :] for t in some]
        left, left_mask = _pad(prompts, device, left=True)
        right, right_mask = _pad(answers, device, left=False)
        yield Micro(left, left_mask, right, right_mask, advantages[start : start + rows].to(device))


def _pad(rows: list[np.ndarray], device: torch.device, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(row) for row in rows)
    ids, mask = np.zeros((len(rows), longest), np.int64), np.zeros((len(rows), longest), np.int64)
    for k, row in enumerate(rows):
        place = slice(longest - len(row), longest) if left else slice(0, len(row))
        ids[k, place], mask[k, place] = row, 1
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)


def _make_model(folder: str) -> str:
    """Saves a random model that is small but not tiny; returns its name."""
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    made = Qwen3ForCausalLM(config)
    made.save_pretrained(folder)
    return f"random Qwen3 of {made.num_parameters() / 1e6:.1f} M parameters"


def _timed(function: Callable[[], object]) -> float:
    begun = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun
