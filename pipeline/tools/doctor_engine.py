"""`penstock doctor engine`: whether an engine computes what the trainer computes, before a run spends money on it."""

from __future__ import annotations

import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock.pipeline.config import Config, TinyModel
from penstock.services.data import DataError, open_source
from penstock.services.modeling.dtypes import DTYPES
from penstock.services.modeling.head import compute_head_in
from penstock.services.modeling.load import load_model
from penstock.services.modeling.parallel.world import World
from penstock.services.modeling.precision import LOGPROBS
from penstock.services.modeling.routing import Replay, as_given, mixture_of
from penstock.services.modeling.sight import forget_seen, give_sight
from penstock.services.modeling.towers import towers
from penstock.services.modeling.version_weights import version_of
from penstock.services.rollout.engines.base import Completion, Engine, EngineError, Refusal, Request, RequestError
from penstock.services.rollout.service import make_engine
from penstock.services.runtime import logs
from penstock.services.runtime.errors import SetupError
from penstock.services.trainer.canary import canary_tokens
from penstock.services.trainer.mismatch import Mismatch
from penstock.services.turns.tokenizer import TextError, Tokenizer

NUDGE = 0.02
"""Relative change of every weight that makes the second version."""
DEADLINE_S = 600.0
MARKS = {True: "[green]✓[/]", False: "[red]✗[/]", None: "·"}


@dataclass
class _Findings:
    rows: list[tuple[bool | None, str, str]] = field(default_factory=list)
    """Whether it is as it should be, or None of a note."""

    def add(self, ok: bool | None, what: str, found: str) -> None:
        self.rows.append((ok, what, found))


def examine_engine(console: Console, config: Config, prompts: int) -> bool:
    """Starts the engine, loads two versions into it and lets it answer ``prompts`` of the run's prompts under each; all
    log-probabilities are compared with transformers'. Prints a table; returns whether they agree."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    logs.quiet()
    findings = _Findings()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("the model")

        def say(what: str) -> None:
            progress.update(task, description=what)

        path = _model_path(config, Path(folder), say)
        text = Tokenizer(path, config.template)
        say(f"starting the engine ({config.rollout.engine.type})")
        started = time.monotonic()
        try:
            engine = make_engine(
                config.rollout, path, config.model.dtype, text, head_dtype=config.model.head_dtype,
                pictures=config.show_pictures,
                towers_learn=config.trainer.train_towers,
            )  # fmt: skip
            findings.add(True, "start", f"{time.monotonic() - started:.1f} s")
            try:
                _examine(engine, config, path, text, prompts, findings, say)
            finally:
                engine.close()
        except EngineError as error:
            raise SetupError(f"rollout.engine: {error}") from error
    table = Table("", "check", "found", box=None)
    for ok, what, found in findings.rows:
        table.add_row(MARKS[ok], what, escape(found))
    console.print(table)
    good = all(ok is not False for ok, _, _ in findings.rows)
    console.print(
        "the engine computes what the trainer computes"
        if good
        else "the engine and the trainer disagree: see docs/engines.md before you train with it"
    )
    return good


def _model_path(config: Config, folder: Path, say: Any) -> str:
    if not isinstance(config.model, TinyModel):
        return config.model.path
    from penstock.pipeline.models.tiny import build

    build(config.model, open_source(config.prompts.train), folder, config.run.seed, lambda step, steps, _: say(
        f"making the tiny model: warm start {step}/{steps}"
    ))  # fmt: skip
    return str(folder)


def _examine(
    engine: Engine, config: Config, path: str, text: Tokenizer, prompts: int, findings: _Findings, say: Any
) -> None:
    model = load_model(path, config.model.dtype, torch.device("cpu")).eval()
    compute_head_in(model, config.model.head_dtype)
    if config.rollout.sampling.routing_replay:
        Replay(model)
    give_sight(model, path, config.model.dtype, torch.device("cpu"))
    still = {} if config.trainer.train_towers else towers(model)
    frozen = {id(parameter) for tower in still.values() for parameter in tower.parameters()}
    tolerance = config.weights.canary_tolerance or LOGPROBS[config.model.dtype]
    ids = canary_tokens(text.plain, model.config, max(2, config.weights.canary_tokens))
    scored = np.array(ids, np.int32)
    asked = _requests(config, text, prompts)
    if showing := sum(bool(request.pictures) for request in asked):
        findings.add(None, "pictures", f"{showing} of {len(asked)} prompts show some")
    seen: list[np.ndarray] = []
    for version in range(2):
        if version:
            with torch.no_grad():
                for parameter in (p for p in model.parameters() if id(p) not in frozen):
                    parameter.mul_(1 + NUDGE * torch.randn(parameter.shape, dtype=torch.float32).to(parameter.dtype))
            forget_seen(model)
        say(f"loading version {version}")
        weights = version_of(model)
        if not engine.remote:  # which copies them itself
            weights = {name: tensor.clone() for name, tensor in weights.items()}
        prepared = engine.prepare(weights)
        started = time.monotonic()
        engine.swap(prepared, version)
        findings.add(True, f"version {version}: load", f"{1000 * (time.monotonic() - started):.1f} ms")
        seen.append(engine.score(prepared, scored))
        wrong = np.abs(seen[-1] - _logprobs(model, scored, 1.0))
        findings.add(
            bool(wrong.mean() <= tolerance),
            f"version {version}: log-probabilities of a text",
            f"mean difference {wrong.mean():.2g}, largest {wrong.max():.2g} (tolerance of the mean {tolerance:g})",
        )
        say(f"answering {prompts} prompts under version {version}")
        _compare(engine, config, model, asked, version, tolerance, findings)
    moved = float(np.abs(seen[1] - seen[0]).mean())
    findings.add(moved > tolerance, "the second version replaced the first", f"log-probabilities moved by {moved:.2g}")
    nbytes = sum(p.numel() for p in model.parameters()) * DTYPES[config.model.dtype].itemsize
    findings.add(True, "weights", f"{nbytes / 2**20:,.0f} MiB in {config.model.dtype}")


def _requests(config: Config, text: Tokenizer, prompts: int) -> list[Request]:
    """The first that are usable; those that are not a run drops as well."""
    source, sampling = open_source(config.prompts.train), config.rollout.sampling.training()
    asked: list[Request] = []
    for number in range(len(source)):
        if len(asked) == prompts:
            break
        with suppress(DataError, TextError):
            prompt = source[number]
            tokens = text.encode(prompt)
            asked.append(Request(number, config.run.seed, tokens, sampling, pictures=prompt.pictures))
    return asked


def _compare(
    engine: Engine,
    config: Config,
    model: Any,
    asked: list[Request],
    version: int,
    tolerance: float,
    findings: _Findings,
) -> None:
    by_number = {}
    for request in asked:
        try:
            engine.submit(request)
            by_number[request.number] = request
        except RequestError as error:  # too long, say: a run drops it
            if version == 0:
                findings.add(None, f"prompt {request.number}: not asked", str(error))
    if not by_number:
        findings.add(False, f"version {version}: answers", "the engine takes none of the prompts")
    done: list[Completion] = []
    started = time.monotonic()
    while engine.pending():
        for result in engine.step():
            if isinstance(result, Refusal):
                findings.add(False, f"prompt {result.number}", result.reason)
            else:
                done.append(result)
        if time.monotonic() - started > DEADLINE_S:
            findings.add(False, "answers", f"{engine.pending()} continuations are not done after {DEADLINE_S:.0f} s")
            return
    seconds, tokens = time.monotonic() - started, sum(len(c.tokens) for c in done)
    if not tokens:
        return
    mismatch = Mismatch()
    for completion in done:
        request = by_number[completion.number]
        expected = _trainers(model, request, completion, config.rollout.sampling.temperature)
        every = torch.ones((1, len(expected)), dtype=torch.bool)
        mismatch.add(torch.from_numpy(expected)[None], torch.from_numpy(completion.logprobs)[None], every, every)
    found = mismatch.metrics(World(torch.device("cpu")))
    findings.add(
        found["mismatch"] <= tolerance,
        f"version {version}: log-probabilities of its own answers",
        f"mean difference {found['mismatch']:.2g}, largest {found['mismatch_max']:.2g}, "
        f"KL (k3) {found['mismatch_kl_k3']:.2g}, effective samples {100 * found['mismatch_ess']:.1f} %, "
        f"{len(done)} answers at {tokens / seconds:,.0f} tok/s",
    )
    labels = {int(v) for c in done for v in c.versions}
    findings.add(labels == {version}, f"version {version}: label of every token", ", ".join(map(str, sorted(labels))))


@torch.inference_mode()
def _trainers(model: Any, request: Request, completion: Completion, temperature: float) -> np.ndarray:
    """float32 ``[new tokens]``: what the trainer would compute; over what the sampler kept, and with the experts that
    the engine took, where that was recorded."""
    given: dict[str, Any] = {}
    mixture, prompt = mixture_of(model), request.tokens
    if mixture and completion.routing.size:
        if fault := mixture.fault(completion.routing):
            raise EngineError(fault)
        given = {"routing": torch.from_numpy(as_given(completion.routing)[None])}
    ids = torch.from_numpy(np.concatenate([prompt, completion.tokens]).astype(np.int64))
    if request.pictures:
        real, sampled = torch.ones_like(ids[None]), torch.arange(len(ids))[None] >= len(prompt)
        given |= {"attention_mask": real, **model.penstock_sight.inputs(ids[None], real, sampled, [request.pictures])}
    logits = model(ids[None], **given).logits[0, len(prompt) - 1 : -1].float() / (temperature or 1.0)
    for row, kept in enumerate(np.split(completion.candidate_ids, np.cumsum(completion.candidate_counts)[:-1])):
        if kept.size:
            keep = torch.zeros(logits.shape[1], dtype=torch.bool)
            keep[torch.from_numpy(kept.astype(np.int64))] = True
            logits[row].masked_fill_(~keep, -torch.inf)
    return logits.log_softmax(-1).gather(-1, ids[len(prompt) :, None]).squeeze(-1).numpy()


@torch.inference_mode()
def _logprobs(model: Any, tokens: np.ndarray, temperature: float) -> np.ndarray:
    """float32 ``[tokens - 1]`` by transformers."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    logs = (model(ids).logits[0].float() / temperature).log_softmax(-1)
    return logs[:-1].gather(-1, ids[0, 1:, None]).squeeze(-1).numpy()
