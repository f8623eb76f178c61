"""What the trainer makes of each token of a step, for people who look at rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import structlog
import torch

from penstock.services.learning.batch import TrainingBatch
from penstock.services.modeling.parallel.world import World
from penstock.services.modeling.pinned import to_host
from penstock.services.trainer import judged
from penstock.services.trainer.algorithms.compose import Part

log = structlog.get_logger()


class Judgements:
    """Of one step. Each rank takes what its own micro-batches have; `write` puts them together. Trajectories that were
    not learned from have none."""

    def __init__(self, step: TrainingBatch) -> None:
        self._step = step
        self._ends = np.cumsum([len(trajectory.tokens) for trajectory in step.trajectories], dtype=np.int64)
        self._noted: list[tuple[Sequence[int] | np.ndarray, list[Callable[[], torch.Tensor]]]] = []
        """Places, and what comes from the device for each of `judged.NAMES`."""
        self._seen = np.zeros(len(step.trajectories), np.float32)

    def note(self, places: Sequence[int] | np.ndarray, part: Part) -> None:
        """Takes a micro-batch whose trajectories are those at ``places`` of the step, and waits for nothing."""
        self._noted.append((places, [to_host(found.detach().float()) for found in (part.policy, part.advantages)]))
        self._seen[list(places)] = 1

    def values(self, world: World) -> np.ndarray:
        """float32 ``[judged.NAMES, tokens of the step]``, of all ranks, on each of them: every one calls it."""
        every = np.zeros((len(judged.NAMES), int(self._ends[-1]) if self._ends.size else 0), np.float32)
        for places, coming in self._noted:
            for values, found in zip(every, coming, strict=True):
                for row, place in zip(found().numpy(), places, strict=True):
                    end, size = int(self._ends[place]), len(self._step.trajectories[place].tokens)
                    values[end - size + 1 : end] = row[: size - 1]
        return world.sum_array(every)

    def write(self, folder: Path, number: int, keep: int | Literal["all"], world: World) -> None:
        """Of step ``number``; every rank calls it, and rank 0 writes, see `judged.write`. Where it cannot be written
        that is logged: it costs nobody the step."""
        values, seen = self.values(world), world.sum_array(self._seen)
        if world.rank:
            return
        parts = np.split(values, self._ends[:-1], axis=1) if self._ends.size else []
        groups: dict[int, list[np.ndarray]] = {}
        for group, noted, part in zip(self._step.groups.tolist(), seen, parts, strict=True):
            groups.setdefault(group, []).append(part if noted else np.full_like(part, np.nan))
        try:
            judged.write(folder, number, keep, groups)
        except OSError as error:
            log.warning("what the trainer made of a step's tokens could not be written", step=number, error=str(error))
