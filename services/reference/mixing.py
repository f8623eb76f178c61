"""A reference that moves part of the way to the policy at each refresh, and stays between (`reference.mix`).

What it has become lies in the run's folder, a model for each refresh, so that a process that begins anew goes on from
there, and several have the same. Each is made of one checkpoint and the one before it, in fp32, number by number: the
same whoever makes it, and when.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import safe_open

from penstock.services.modeling.experts import as_in_files
from penstock.services.modeling.load import load_model
from penstock.services.modeling.weight_files import INDEX, save_in_parts
from penstock.services.runtime import checkpoint_folders, health
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.files import sync

KEPT = 2
"""Models that stay: another process may be reading the one before the newest."""


def mix_up_to(
    newest: int, due: list[int], checkpoints: Path, mixtures: Path, start: str, share: float
) -> tuple[int, Path]:
    """The model that the reference is once it has moved to the version ``newest``, or to the first one behind it that
    others have left, and which version that is: below ``mixtures``, where those that are not there yet are made of the
    versions ``due``, ascending, among ``checkpoints``. It begins as the model at ``start``; ``share`` is the policy's.
    Raises `SetupError`."""
    mixtures.mkdir(exist_ok=True)
    made = checkpoint_folders.versions(mixtures)
    if ahead := [version for version in made if version >= newest]:
        return ahead[0], checkpoint_folders.path_of(mixtures, ahead[0])
    last = made[-1] if made else 0
    before = checkpoint_folders.path_of(mixtures, last) if made else Path(start)
    for version in (version for version in due if last < version <= newest):
        target = checkpoint_folders.path_of(mixtures, version)
        aside = mixtures / f".{target.name}.{socket.gethostname()}-{os.getpid()}"
        shutil.rmtree(aside, ignore_errors=True)
        _mix(checkpoint_folders.path_of(checkpoints, version), str(before), share, aside)
        for path in (*aside.rglob("*"), aside):
            sync(path)  # what it was made of may be deleted as soon as it has its name
        try:
            aside.rename(target)
            sync(mixtures)
        except OSError:  # another process has made the same
            if not target.is_dir():
                raise
            shutil.rmtree(aside)
        before = target
    _remove_old(mixtures)
    return newest, before


def _mix(policy: Path, before: str, share: float, folder: Path) -> None:
    """Into ``folder``: the checkpoint ``policy`` as it is, but for its weights, of which it has ``share``, and the
    model ``before`` the rest."""
    left = shutil.ignore_patterns("*.safetensors", INDEX, "trainer")
    shutil.copytree(policy, folder, ignore=left)
    model = load_model(before, "float32", torch.device("cpu"), "reference.mix")
    old = dict(as_in_files(model.config.model_type, model.state_dict()))
    save_in_parts(folder, _mixed(policy, before, old, share))


def _mixed(policy: Path, before: str, old: dict[str, torch.Tensor], share: float) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(policy.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in sorted(weights.keys()):
                health.beat()
                new, was = weights.get_tensor(name), old.get(name)
                if was is None or was.shape != new.shape:
                    raise SetupError(
                        f"reference.mix: {name} of the policy is {list(new.shape)}, and in {before} "
                        f"{'there is none' if was is None else f'it is {list(was.shape)}'}; a reference that moves to "
                        "the policy has its shape: leave out reference.path, or set reference.mix=1.0"
                    )
                yield name, was.lerp(new, share) if new.is_floating_point() else new


def _remove_old(mixtures: Path) -> None:
    """All but the newest, and what a process that died has left of older ones."""
    versions = checkpoint_folders.versions(mixtures)
    for version in versions[:-KEPT]:
        shutil.rmtree(checkpoint_folders.path_of(mixtures, version), ignore_errors=True)
    for left in mixtures.glob(".step-*"):
        with suppress(ValueError):
            if versions and int(left.name.split(".")[1].removeprefix("step-")) < versions[-1]:
                shutil.rmtree(left, ignore_errors=True)
