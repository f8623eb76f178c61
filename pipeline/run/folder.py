"""A run's folder: made for a new run, taken up by one that goes on."""

from __future__ import annotations

import json
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

from penstock.pipeline.config import Config, ConfigError, PretrainedModel, dump, load
from penstock.pipeline.config.origin import Origin
from penstock.pipeline.config.origin import read as read_origin
from penstock.pipeline.config.origin import write as write_origin
from penstock.pipeline.run import crashes
from penstock.pipeline.run.resume import check_fixed
from penstock.services.runtime.files import write_whole

LIVE_S = 10.0


def new_folder(config: Config, config_path: Path) -> Path:
    """A new, empty folder for a run. Raises `ConfigError` where it exists already."""
    name = config.run.name or f"{config_path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(config.run.folder) / name
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"run.name: {folder} exists and is not empty; choose another name, or remove it")
    make_folder(folder, "run.folder")
    return folder


def make_folder(folder: Path, key: str) -> None:
    """Raises `ConfigError`, which names ``key``, where ``folder`` cannot be made or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{key}: cannot write to {folder}: {error.strerror}; choose another folder") from None


def open_folder(config: Config, folder: Path, origin: Origin) -> None:
    """Makes ``folder`` ready for actors that are started one by one, for the first time or again. Raises `ConfigError`
    where its run is complete, or began with another model or data."""
    make_folder(folder, "--folder")
    recorded = folder / "config.yaml"
    began = load(recorded) if recorded.is_file() else None
    if began:
        check_fixed(began, config)
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
    begin(config, folder, origin)


def begin(config: Config, folder: Path, origin: Origin) -> None:
    """A run starts in ``folder``, or goes on: its config and its origin are written down, each in one piece (others may
    be reading the one before), and what an earlier start came to is forgotten."""
    own = folder / "config.yaml"
    if Path(origin.file) != own.resolve() or not read_origin(folder):  # its own copy says nothing of where it is from
        write_origin(folder, origin)
    write_whole(own, dump(config))
    (folder / "summary.json").unlink(missing_ok=True)
    crashes.forget(folder)


def model_path(config: Config, folder: Path) -> str:
    """Where the model that training starts from lies. Raises `ConfigError` where a tiny model is not made yet."""
    if isinstance(config.model, PretrainedModel):
        return config.model.path
    path = folder / "model"
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model: there is no model in {path}; make it with: penstock prepare CONFIG --folder {folder}"
        )
    return str(path)


def address_file(folder: Path) -> Path:
    """Where the broker of the run in ``folder`` says how it is reached."""
    return folder / "broker.address"


def keys_folder(folder: Path) -> Path:
    """Where the CURVE keys of the run in ``folder`` are."""
    return folder / "keys"


def run_key(folder: Path) -> str:
    """The run's own key, made once, kept in its folder: by it the store is known to be this run's."""
    path = folder / "run.key"
    if not path.is_file():
        write_whole(path, secrets.token_hex(16), mode=0o600)
    return path.read_text().strip()


def summary_of(folder: Path) -> dict[str, Any] | None:
    """What the run in ``folder`` came to; None while it is not over."""
    path = folder / "summary.json"
    return json.loads(path.read_text()) if path.is_file() else None


def _is_live(folder: Path) -> bool:
    """A broker wrote a line about its actors just now, as it does every second."""
    beats = folder / "actors.jsonl"
    return beats.is_file() and time.time() - beats.stat().st_mtime < LIVE_S and summary_of(folder) is None
