"""`penstock bench generate`: the torch engine beside plain ``model.generate`` on the same model and requests."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from penstock.pipeline.bench.machine import describe
from penstock.protocols.experience import Sampling
from penstock.services.modeling.load import device_of
from penstock.services.modeling.version_weights import version_of
from penstock.services.rollout.config import TorchEngineConfig
from penstock.services.rollout.engines.base import Request
from penstock.services.rollout.engines.torch.engine import TorchEngine

PROMPT_TOKENS = (8, 64)
NEW_TOKENS = (4, 64)


def bench(
    console: Console, model_path: str | None, requests: int, batch: int, threads: int, repeats: int, seed: int
) -> None:
    """Prints a table: useful tokens a second of each way, and their ratio, the median over the turns.

    Every request has a prompt and an answer of random length; plain ``generate`` runs batches of ``batch`` in arrival
    order, each until its longest answer is done, which is what it can do.
    """
    torch.set_num_threads(threads)
    device = device_of("auto")
    model, name = make_model(model_path, device)
    random = np.random.default_rng(seed)
    vocabulary = model.config.vocab_size
    prompts = [
        random.integers(0, vocabulary, random.integers(*PROMPT_TOKENS)).astype(np.int32) for _ in range(requests)
    ]
    answers = [int(n) for n in random.integers(*NEW_TOKENS, size=requests)]
    useful = sum(answers)

    engine_config = TorchEngineConfig(max_sequences=batch, max_length=PROMPT_TOKENS[1] + NEW_TOKENS[1])
    dtype = str(model.dtype).removeprefix("torch.")
    engine = TorchEngine(engine_config, model.config, dtype, set(), lambda ids: "")
    engine.swap(engine.prepare(version_of(model)), 0)

    def ours() -> None:
        for number, (prompt, new) in enumerate(zip(prompts, answers, strict=True)):
            engine.submit(Request(number, seed, prompt, Sampling(max_new_tokens=new)))
        while engine.pending():
            engine.step()

    def plain() -> None:
        for start in range(0, requests, batch):
            _generate(model, prompts[start : start + batch], max(answers[start : start + batch]), device)

    rates: dict[str, list[float]] = {"penstock torch engine": [], "model.generate": []}
    for _ in range(repeats):  # in turns, so that a noisy machine disturbs both alike
        for label, function in (("penstock torch engine", ours), ("model.generate", plain)):
            rates[label].append(useful / _timed(function))
    table = Table(
        title=f"generate: {requests} requests, prompts {PROMPT_TOKENS}, answers {NEW_TOKENS} tokens, batch {batch}"
    )
    for column in ("way", "tokens/s (median)", "runs", "ratio"):
        table.add_column(column)
    for label, values in rates.items():
        runs = ", ".join(f"{value:,.0f}" for value in values)
        # Of each turn, and then their median: a machine that is slower for a while is so for both of a turn.
        ratio = statistics.median(mine / its for mine, its in zip(values, rates["model.generate"], strict=True))
        table.add_row(label, f"{statistics.median(values):,.0f}", runs, f"{ratio:.2f}")
    console.print(table)
    console.print(f"{name}, {dtype}, {device}, {threads} threads; {describe()}", highlight=False)


def make_model(path: str | None, device: torch.device) -> tuple[Any, str]:
    """The model of ``path``, or a random one of the quickstart's size, with its name."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    if path:
        return AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").to(device).eval(), path
    config = Qwen3Config(
        vocab_size=51, hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).to(device).eval(), "random Qwen3 of 0.5 M parameters (the quickstart's)"


def _generate(model: Any, prompts: list[np.ndarray], new: int, device: torch.device) -> None:
    width = max(len(prompt) for prompt in prompts)
    tokens = torch.zeros((len(prompts), width), dtype=torch.long)
    attention = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        attention[row, width - len(prompt) :] = 1
    with torch.inference_mode():
        model.generate(
            input_ids=tokens.to(device), attention_mask=attention.to(device), max_new_tokens=new, min_new_tokens=new,
            do_sample=True, pad_token_id=0,
        )  # fmt: skip


def _timed(function: Callable[[], None]) -> float:
    started = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started
