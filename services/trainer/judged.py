"""What the trainer made of each token of an archived step, as a file beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from penstock.protocols import wire
from penstock.services.runtime.files import remove_numbered, write_whole

NAMES = ("trainer_logprobs", "advantages")
"""The trainer's log-probability (nats) as the loss first saw it, and the advantage that the loss had."""
Judged = dict[int, dict[str, list[np.ndarray]]]
"""By the number of a group and by `NAMES`: float32 ``[tokens]`` of each trajectory that is no greedy baseline, NaN of
those that had no part in the loss."""


def write(folder: Path, number: int, keep: int | Literal["all"], groups: Mapping[int, Sequence[np.ndarray]]) -> None:
    """Of step ``number``, into an archive of whose last ``keep`` steps there are files; ``groups``: float32
    ``[NAMES, tokens]`` of each trajectory. Raises `OSError`."""
    rows = [
        {"number": group, "sizes": [part.shape[1] for part in several]}
        | dict(zip(NAMES, np.ascontiguousarray(np.concatenate(several, axis=1)), strict=True))
        for group, several in groups.items()
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(_file(folder, number), wire.pack({"step": number, "groups": rows}))
    if keep != "all":
        remove_numbered(folder, "judged-", number - keep)


def read(folder: Path, number: int) -> Judged:
    """Of step ``number`` of an archive; empty where there is none, as of runs whose trainer has a disk of its own, or
    it cannot be read."""
    found: Judged = {}
    try:
        for group in wire.unpack(_file(folder, number).read_bytes())["groups"]:
            ends = np.cumsum(group["sizes"])[:-1]
            found[group["number"]] = {name: np.split(group[name], ends) for name in NAMES}
    except (OSError, wire.WireError, AttributeError, KeyError, TypeError, ValueError):
        return {}
    return found


def _file(folder: Path, number: int) -> Path:
    return folder / f"judged-{number:06d}.msgpack"
