"""`penstock eval`: a checkpoint's answers to the evaluation sets of a config, and nothing trained."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from penstock.pipeline.config import ConfigError, PretrainedModel, load
from penstock.pipeline.config.load import as_overrides
from penstock.pipeline.config.origin import key_of
from penstock.pipeline.report.console import print_findings
from penstock.pipeline.run.start import start
from penstock.pipeline.tools.merge import adapter_of, in_critics_folder, is_critic, refuse_run
from penstock.services.modeling.adapter_files import AdapterShape
from penstock.services.runtime.user_folders import find_folder

NOTHING_LEARNED = "trainer.algorithm={advantage: {type: reinforce_plus_plus}}"
"""Needs no reference, no critic and no groups."""


def evaluate(console: Console, checkpoint: str, file: Path, overrides: list[str], as_json: bool = False) -> int:
    """Prints what came of it; returns the exit code. Raises `ConfigError`."""
    config = load(file, overrides)
    if not config.prompts.eval or not config.prompts.eval_size:
        raise ConfigError("prompts.eval: there is nothing to evaluate on; name a data source, e.g. {type: sort}")
    path = str(find_folder(checkpoint) or checkpoint)
    refuse_run(Path(path))
    about = adapter_of(Path(path))
    if (about.valued if about else is_critic(Path(path))) or in_critics_folder(Path(path)):
        raise ConfigError(f"CHECKPOINT: {path} is a critic, which answers nothing; give a policy's")
    model: dict[str, Any] = {"type": "pretrained", "path": about.base if about else path, "dtype": config.model.dtype}
    model["head_dtype"] = config.model.head_dtype
    if isinstance(config.model, PretrainedModel):  # its prompts are told as they were when it was trained
        model |= config.model.model_dump(include={"chat_template", "chat_template_kwargs", "trust_remote_code"})
    own = as_overrides({"model": model, "trainer.lora": _adapter(about, path), "trainer.steps": 0})
    own += [NOTHING_LEARNED, "reference.refresh_every=0", "reference.mix=1"]
    own += ["replay.filter=none", "replay.archive=none"]
    own += ["rollout.given={}", "trainer.freeze=[]", "trainer.train_towers=false"]
    own += ["prompts.eval_given=null", "prompts.best_by=null"]
    if getattr(config.rollout.engine, "adapter", "merged") != "merged":
        own.append("rollout.engine.adapter=merged")  # what is published is whole
    # FILE's own name may be that of the run which made the checkpoint.
    if config.run.name is None or not any(key_of(override) in ("run", "run.name") for override in overrides):
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).name)
        own.append(f"run.name=eval-{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    return start(console, str(file), [*overrides, *own], None, False, print_json if as_json else print_evaluation)


def _adapter(about: AdapterShape | None, path: str) -> dict[str, Any] | None:
    """`trainer.lora` that is as the adapter in ``path``: the trainer merges it into what it publishes."""
    if about is None:
        return None
    own = ("rank", "alpha", "targets", "variant", "quantize")
    return {name: value for name in own if (value := getattr(about, name)) is not None} | {"start": path}


def print_evaluation(console: Console, summary: dict[str, Any], folder: Path) -> None:
    """The mean reward of every set, what several answers to a prompt tell, and what the reward is made of: a line
    each."""

    def say(words: str) -> None:
        console.print(words, highlight=False, markup=False, soft_wrap=True)

    found = _found(summary)
    width = max(map(len, found), default=0)
    sets = list(dict.fromkeys(name.partition("/")[0] for name in found))
    for name in sorted(found, key=lambda name: sets.index(name.partition("/")[0])):
        say(f"{name:{width}}  {'-' if found[name] is None else f'{found[name]:.4f}'}")
    most = load(folder / "config.yaml").prompts.eval_size
    say(f"the reward of each set, and what it is made of; of its first {most:,} rows at most (prompts.eval_size)")
    say(f"folder, one of its own for each evaluation: {folder}")
    for what, name in (("evaluation; see", "metrics.jsonl"), ("answers:", "eval_samples.jsonl")):
        say(f"{what} {folder / name}")
    print_findings(console, summary)


def print_json(_console: Console, summary: dict[str, Any], folder: Path) -> None:
    """The same as one JSON object, alone on stdout."""
    found = {"folder": str(folder), "outcome": summary["outcome"], "found": _found(summary)}
    typer.echo(json.dumps(found | {"look_at_this": summary["look_at_this"]}))


def _found(summary: dict[str, Any]) -> dict[str, Any]:
    """As `metrics.jsonl` calls it: ``SET``, ``SET/pass@4``, ``SET/reward/NAME``."""
    return {**summary["evaluations"].get("before", {}), **summary["evaluation_parts"].get("before", {})}
