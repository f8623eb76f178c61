"""Checkpoints, and parts of them, that are removed: whatever has its name is whole."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from penstock.services.runtime.checkpoint_folders import optimizer_of, path_of, versions

_PARTIAL, _REMOVED = ".{}.partial", ".removed-"


def aside(target: Path) -> Path:
    """Where a checkpoint is written that will be ``target``."""
    return target.with_name(_PARTIAL.format(target.name))


def remove_partial(folder: Path) -> None:
    """Removes what a trainer that died while it saved has left."""
    for path in folder.glob(_PARTIAL.format("step-*")):
        discard(path)
    _sweep(folder)


def discard(path: Path) -> list[str]:
    """Removes it, if it is there; returns what stays of it. It loses its name first: a trainer that still writes there
    makes nothing torn of it. Raises `OSError` where it keeps its name."""
    with suppress(FileNotFoundError):
        path.rename(path.with_name(f"{_REMOVED}{secrets.token_hex(4)}-{path.name}"))
    return _sweep(path.parent)


def remove_old(
    folder: Path, keep: int, stays: Callable[[int], bool], with_optimizer: Collection[int] | None
) -> set[str]:
    """Of the checkpoints below ``folder`` all but the newest ``keep`` and those of versions that ``stays`` says; of
    these older ones the optimizer's state, too, unless they are ``with_optimizer`` (None: all are). Returns what could
    not be removed now, since somebody on NFS has it open, say."""
    left: list[str] = []
    for old in versions(folder)[:-keep]:
        stripped = with_optimizer is not None and old not in with_optimizer
        try:
            if not stays(old):
                left += discard(path_of(folder, old))
            elif stripped:
                left += discard(optimizer_of(folder, old))
        except OSError as error:
            left.append(str(error.filename))
    return {*left, *_sweep(folder)}


def _sweep(folder: Path) -> list[str]:
    """Removes what has lost its name; returns what stays of it."""
    left: list[str] = []
    for path in folder.glob(f"{_REMOVED}*"):
        shutil.rmtree(path, ignore_errors=True)
        left += [str(path)] if path.exists() else []
    return left
