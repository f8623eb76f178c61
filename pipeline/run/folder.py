"""A run's folder: made for a new run, taken up by one that goes on."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from penstock.pipeline.config import Config, ConfigError, dump, load

FIXED = ("model", "prompts", "run.seed", "run.deterministic", "rollout.sampling.n")
"""What a resumed run must have as it began."""
LIVE_S = 10.0


def new_folder(config: Config, config_path: Path) -> Path:
    """A new, empty folder for a run. Raises `ConfigError` where it exists already."""
    name = config.run.name or f"{config_path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(config.run.folder) / name
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"run.name: {folder} exists and is not empty; choose another name, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def resumed_folder(config: Config, folder: Path) -> Path:
    """The folder of a run that goes on. Raises `ConfigError` where it is none, or began with another model or data."""
    recorded = folder / "config.yaml"
    if not recorded.is_file():
        raise ConfigError(f"--resume: {folder} is not a run's folder: it has no config.yaml")
    _check_fixed(load(recorded), config)
    return folder


def open_folder(config: Config, folder: Path) -> None:
    """Makes ``folder`` ready for actors that are started one by one, for the first time or again. Raises `ConfigError`
    where its run is complete, or began with another model or data."""
    folder.mkdir(parents=True, exist_ok=True)
    recorded = folder / "config.yaml"
    began = load(recorded) if recorded.is_file() else None
    if began:
        _check_fixed(began, config)
    if began and began != config and _is_live(folder):
        raise ConfigError(
            f"the run in {folder} is going on, and its config cannot change meanwhile: stop it, or give the same config"
        )
    before = summary_of(folder)
    if began and before and before["outcome"] == "complete" and config.trainer.steps <= began.trainer.steps:
        raise ConfigError(
            f"the run in {folder} is complete: {before['steps']} steps, reward {before['reward_last']:.3f}, see "
            f"{folder / 'summary.json'}; raise trainer.steps to go on, or choose another folder for another run"
        )
    (folder / "summary.json").unlink(missing_ok=True)
    write_config(config, folder)


def write_config(config: Config, folder: Path) -> None:
    """The resolved config, in one piece: others may be reading the one before."""
    aside = folder / ".config.yaml"
    aside.write_text(dump(config))
    aside.rename(folder / "config.yaml")


def summary_of(folder: Path) -> dict[str, Any] | None:
    """What the run in ``folder`` came to; None while it is not over."""
    path = folder / "summary.json"
    return json.loads(path.read_text()) if path.is_file() else None


def _check_fixed(began: Config, config: Config) -> None:
    for key in FIXED:
        before, now = _value(began, key), _value(config, key)
        if before != now:
            raise ConfigError(f"{key}: {now!r}, but the run began with {before!r}; a resumed run cannot change that")


def _is_live(folder: Path) -> bool:
    """A broker wrote a line about its actors just now, as it does every second."""
    beats = folder / "actors.jsonl"
    return beats.is_file() and time.time() - beats.stat().st_mtime < LIVE_S and summary_of(folder) is None


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
