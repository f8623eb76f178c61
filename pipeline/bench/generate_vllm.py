"""`penstock bench generate --engine vllm`: our engine beside plain ``AsyncLLM`` on the same requests, and the pause of
a weight update beside the cycle of vLLM itself."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from penstock.pipeline.bench.generate import NEW_TOKENS, PROMPT_TOKENS, make_model
from penstock.pipeline.bench.machine import describe
from penstock.protocols.experience import Sampling
from penstock.services.modeling.version_weights import version_of
from penstock.services.rollout.config import VllmEngineConfig
from penstock.services.rollout.engines.base import Request
from penstock.services.rollout.engines.vllm.engine import VllmEngine
from penstock.services.runtime import logs
from penstock.services.runtime.gpus import visible_gpus

UPDATES = 15
SHARE = 0.4
"""Of a GPU, that each of the two engines has."""


def bench(
    console: Console, model_path: str | None, requests: int, batch: int, threads: int, repeats: int, seed: int
) -> None:
    """Prints two tables. Both ways have ``batch`` requests in flight, the same engine arguments and the same sampling
    parameters; the plain one is what a user of vLLM would write."""
    import torch

    logs.quiet()
    torch.set_num_threads(threads)
    model, name = make_model(model_path, torch.device("cpu"))
    random = np.random.default_rng(seed)
    vocabulary = model.config.vocab_size
    asked = [
        Request(
            number, seed, random.integers(0, vocabulary, random.integers(*PROMPT_TOKENS)).astype(np.int32),
            Sampling(max_new_tokens=int(random.integers(*NEW_TOKENS))),
        )
        for number in range(requests)
    ]  # fmt: skip
    useful = sum(request.sampling.max_new_tokens for request in asked)
    dtype = str(model.dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory() as folder:
        path = model_path or folder
        if not model_path:
            model.save_pretrained(folder)
        options: dict[str, Any] = {} if (Path(path) / "tokenizer.json").is_file() else {"skip_tokenizer_init": True}
        if visible_gpus():
            options["gpu_memory_utilization"] = SHARE
        config = VllmEngineConfig(max_sequences=batch, max_length=PROMPT_TOKENS[1] + NEW_TOKENS[1], vllm=options)
        console.print("starting vLLM twice: ours, and a plain one", highlight=False)
        ours = VllmEngine(config, model.config, path, dtype, set(), Sampling(), threads)
        plain = VllmEngine(config, model.config, path, dtype, set(), Sampling(), threads)
        weights = version_of(model)
        for engine in (ours, plain):
            engine.swap(engine.prepare(weights), 0)
        rates: dict[str, list[float]] = {"penstock vllm engine": [], "plain AsyncLLM": []}
        for turn in range(repeats + 1):  # the first of each warms up
            for label, seconds in (
                ("penstock vllm engine", _ours(ours, asked, batch)),
                ("plain AsyncLLM", plain.call(_plain(plain.llm, asked, batch), 600.0, "answer")),
            ):
                if turn:
                    rates[label].append(useful / seconds)
        pauses = _pauses(ours, asked, batch, weights)
        for engine in (ours, plain):
            engine.close()
    table = Table(
        title=f"generate: {requests} requests, prompts {PROMPT_TOKENS}, answers {NEW_TOKENS}, {batch} at once"
    )
    for column in ("way", "tokens/s (median)", "runs", "ratio (median of turns)"):
        table.add_column(column)
    for label, values in rates.items():
        runs = ", ".join(f"{value:,.0f}" for value in values)
        ratios = [mine / other for mine, other in zip(values, rates["plain AsyncLLM"], strict=True)]
        table.add_row(label, f"{statistics.median(values):,.0f}", runs, f"{statistics.median(ratios):.2f}")
    console.print(table)
    table = Table(title=f"pause of one weight update, {batch} requests in flight, ms")
    for column in ("way", "median", "slowest"):
        table.add_column(column)
    for label, values in pauses.items():
        table.add_row(label, f"{statistics.median(values) * 1e3:.1f}", f"{max(values) * 1e3:.1f}")
    console.print(table)
    console.print(f"{name}, {dtype}, {threads} threads; {describe()}", highlight=False)


def _ours(engine: VllmEngine, asked: list[Request], batch: int) -> float:
    """Seconds that our engine takes, driven as a rollout drives it."""
    waiting = list(reversed(asked))
    started = time.perf_counter()
    while waiting or engine.pending():
        while waiting and engine.pending() < batch:
            engine.submit(waiting.pop())
        engine.step()
    return time.perf_counter() - started


async def _plain(llm: Any, asked: list[Request], batch: int) -> float:
    """Seconds that vLLM takes by itself."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    room = asyncio.Semaphore(batch)

    async def one(request: Request) -> None:
        parameters = SamplingParams(
            max_tokens=request.sampling.max_new_tokens, ignore_eos=True, logprobs=0, seed=request.seed,
            detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        async with room:
            async for _ in llm.generate(
                {"prompt_token_ids": request.tokens.tolist()}, parameters, f"plain-{time.monotonic_ns()}"
            ):
                pass

    started = time.perf_counter()
    await asyncio.gather(*(one(request) for request in asked))
    return time.perf_counter() - started


def _pauses(engine: VllmEngine, asked: list[Request], batch: int, weights: Any) -> dict[str, list[float]]:
    """Seconds that requests in flight stand still, by our swap and by the cycle of vLLM's documentation."""
    found: dict[str, list[float]] = {"penstock": [], "vLLM's own cycle": []}
    prepared = engine.prepare(weights)

    async def own(version: str) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await engine.llm.pause_generation(mode="keep", clear_cache=False)
        await engine.llm.start_weight_update()
        await engine.llm.update_weights(WeightTransferUpdateRequest(update_info=engine.update_info(prepared)))
        await engine.llm.finish_weight_update(weight_version=version)
        await engine.llm.resume_generation()

    waiting: list[Request] = []
    for version in range(1, 2 * UPDATES + 1):
        while engine.pending() < batch:
            waiting = waiting or list(asked)
            engine.submit(waiting.pop())
        engine.step()
        started = time.perf_counter()
        if version % 2:
            engine.swap(prepared, version)
            found["penstock"].append(time.perf_counter() - started)
        else:
            engine.call(own(str(version)), 60.0, "update its weights")
            found["vLLM's own cycle"].append(time.perf_counter() - started)
    while engine.pending():
        engine.step()
    return found
