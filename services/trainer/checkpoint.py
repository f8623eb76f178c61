"""Checkpoints: the transformers layout, with the trainer's own state in ``trainer/`` beside it. No pickle.

A checkpoint is written aside, synced and renamed, so one that has its name is whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog
from safetensors.torch import load_file, save_file

from penstock.services.modeling.parallel.fsdp import full, like
from penstock.services.modeling.parallel.world import World
from penstock.services.runtime.errors import SetupError
from penstock.services.trainer.learner import Learner

log = structlog.get_logger()

_NAME = re.compile(r"step-(\d{6,})")


class CheckpointError(SetupError):
    """A checkpoint that does not fit the model; says how."""


def save(learner: Learner, tokenizer: Any, folder: Path, keep: int, ledger_tail: Sequence[dict[str, Any]] = ()) -> Path:
    """Writes version ``learner.version`` below ``folder`` and removes all but the newest ``keep``. Returns its path.
    All ranks call it; rank 0 gathers the model on its host, and writes."""
    target = folder / f"step-{learner.version:06d}"
    world = learner.world
    if world.share(b"is there" if target.exists() else b"") == b"is there":  # rank 0 says so for all
        return target
    weights, tensors = {}, {}
    for name, parameter in learner.parameters.items():
        for key, value in {"": parameter.detach(), **learner.optimizer.state.get(parameter, {})}.items():
            whole = full(value)  # one at a time: no device ever holds them all
            if world.rank == 0 and key:
                tensors[f"{name}/{key}"] = whole.cpu().contiguous()
            elif world.rank == 0:
                weights[name] = whole.cpu()
            del whole
    if world.rank:
        return target
    aside = folder / f".{target.name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    own = aside / "trainer"
    own.mkdir(parents=True)
    learner.model.save_pretrained(aside, state_dict=_with_tied(learner.model, weights))
    tokenizer.save_pretrained(aside)
    save_file(tensors, own / "optimizer.safetensors")
    (own / "state.json").write_text(json.dumps({"version": learner.version, "ledger": list(ledger_tail)}))
    for path in aside.rglob("*"):
        if path.is_file():
            _sync(path)
    aside.rename(target)
    _sync(folder)
    for old in versions(folder)[:-keep]:
        shutil.rmtree(folder / f"step-{old:06d}")
    log.info("checkpoint saved", version=learner.version, path=str(target))
    return target


def versions(folder: Path) -> list[int]:
    """The versions with a checkpoint below ``folder``, ascending."""
    matches = (_NAME.fullmatch(path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in matches if match)


def agreed(folder: Path, world: World) -> Path | None:
    """The newest checkpoint that rank 0 sees, for all ranks. Raises `CheckpointError` on one that does not see it."""
    mine = latest(folder) if world.rank == 0 else None
    name = world.share(mine.name.encode() if mine else b"").decode()
    if name and not (folder / name).is_dir():
        raise CheckpointError(f"{folder / name}: rank 0 resumes from it, and rank {world.rank} does not see it")
    return folder / name if name else None


def latest(folder: Path) -> Path | None:
    """The newest checkpoint below ``folder``."""
    found = versions(folder)
    return folder / f"step-{found[-1]:06d}" if found else None


def restore(learner: Learner, path: Path) -> list[dict[str, Any]]:
    """Loads the trainer's own state; the model's weights were loaded from ``path`` already. Returns the ledger tail."""
    state = json.loads((path / "trainer" / "state.json").read_text())
    tensors = load_file(path / "trainer" / "optimizer.safetensors")
    for name, parameter in learner.parameters.items():
        mine = {
            key: tensors[f"{name}/{key}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{name}/{key}" in tensors
        }
        if not mine:
            continue
        if mine["exp_avg"].shape != parameter.shape:
            raise CheckpointError(f"{path}: {name} has another shape than the model's")
        learner.optimizer.state[parameter] = {
            key: value if key == "step" else like(parameter, value) for key, value in mine.items()
        }
    learner.version = state["version"]
    return state["ledger"]


def _with_tied(model: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """``weights`` with buffers, and without what is tied: as `save_pretrained` takes it."""
    buffers = {name: buffer for name, buffer in model.state_dict().items() if name not in weights}
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    return {name: value for name, value in (weights | buffers).items() if name not in tied or name in weights}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
