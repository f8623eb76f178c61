"""What the trainer made of each token of a step: a file beside the archived step, for people who look at rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import structlog

from penstock.protocols import wire
from penstock.services.learning.batch import TrainingBatch
from penstock.services.modeling.parallel.world import World
from penstock.services.runtime.files import write_whole
from penstock.services.trainer.algorithms.compose import Part

log = structlog.get_logger()

NAMES = ("trainer", "advantage")
"""The trainer's log-probability (nats) of the policy that the step began with, and the advantage that the loss had."""
Judged = dict[int, dict[str, list[np.ndarray]]]
"""By the number of a group and by `NAMES`: float32 ``[tokens]`` of each trajectory that is no greedy baseline, NaN of
those that had no part in the loss."""


class Judgements:
    """Of one step. Each rank takes what its own micro-batches have; `write` puts them together."""

    def __init__(self, step: TrainingBatch) -> None:
        self._step = step
        self._ends = np.cumsum([len(trajectory.tokens) for trajectory in step.trajectories], dtype=np.int64)
        self._values = np.zeros((len(NAMES), int(self._ends[-1]) if self._ends.size else 0), np.float32)

    def note(self, places: Sequence[int] | np.ndarray, part: Part) -> None:
        """Takes a micro-batch whose trajectories are those at ``places`` of the step."""
        for values, found in zip(self._values, (part.policy, part.advantages), strict=True):
            rows = found.float().cpu().numpy()
            for row, place in zip(rows, places, strict=True):
                end, size = int(self._ends[place]), len(self._step.trajectories[place].tokens)
                values[end - size + 1 : end] = row[: size - 1]

    def values(self, world: World) -> np.ndarray:
        """float32 ``[NAMES, tokens of the step]``, of all ranks, on each of them: every one calls it."""
        return world.sum_array(self._values)

    def write(self, folder: Path, number: int, keep: int | Literal["all"], world: World) -> None:
        """Of step ``number``; every rank calls it, and rank 0 writes. Of the last ``keep`` steps files are kept. Where
        it cannot be written that is logged: it costs nobody the step."""
        values = self.values(world)
        if world.rank:
            return
        row = {"step": number, "groups": self._by_group(values)}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(_file(folder, number), wire.pack(row))
            if keep != "all":
                _file(folder, number - keep).unlink(missing_ok=True)
        except OSError as error:
            log.warning("what the trainer made of a step's tokens could not be written", step=number, error=str(error))

    def _by_group(self, values: np.ndarray) -> list[dict[str, object]]:
        parts = np.split(values, self._ends[:-1], axis=1) if self._ends.size else []
        found: dict[int, list[np.ndarray]] = {}
        for group, rewarded, part in zip(self._step.groups.tolist(), self._step.rewarded, parts, strict=True):
            found.setdefault(group, []).append(part if rewarded else np.full_like(part, np.nan))
        return [
            {"number": group, "sizes": [part.shape[1] for part in several]}
            | dict(zip(NAMES, np.ascontiguousarray(np.concatenate(several, axis=1)), strict=True))
            for group, several in found.items()
        ]


def read(folder: Path, number: int) -> Judged:
    """Of step ``number`` of an archive; empty where there is none, as of runs whose trainer has a disk of its own."""
    path = _file(folder, number)
    if not path.is_file():
        return {}
    found: Judged = {}
    for group in wire.unpack(path.read_bytes())["groups"]:
        ends = np.cumsum(group["sizes"])[:-1]
        found[group["number"]] = {name: np.split(group[name], ends) for name in NAMES}
    return found


def _file(folder: Path, number: int) -> Path:
    return folder / f"judged-{number:06d}.msgpack"
