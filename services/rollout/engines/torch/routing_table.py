"""Which experts the tokens of each slot were sent to, on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from penstock.protocols.routing import unknown
from penstock.services.modeling.routing import Recorder
from penstock.services.rollout.engines.base import RequestError
from penstock.services.rollout.engines.torch.hosted import HostedModel


class RoutingTable:
    """Of the sequences in ``slots`` slots of up to ``length`` tokens that ``model`` decodes. Raises `RequestError`
    where it has no experts, or none that can be seen."""

    def __init__(self, model: object, slots: int, length: int) -> None:
        if not isinstance(model, HostedModel) or not model.recorder.fits:
            raise RequestError(
                "rollout.sampling.routing_replay: this model has no experts whose choice the embedded engine can note; "
                "set it to false"
            )
        self._model = model
        recorder: Recorder = model.recorder
        self._table = np.full((slots, length, *recorder.shape), unknown(recorder.dtype), recorder.dtype)

    @contextmanager
    def prefilling(self, slots: Sequence[Sequence[int]], lengths: np.ndarray, width: int) -> Iterator[None]:
        """Around the prefill of right-padded rows ``[rows, width]``, each of which fills all of its ``slots``."""
        with self._model.recorder.noting() as found:
            yield
        layers = self._table.shape[2]
        for number, (rows, wide) in enumerate(self._model.runs(lengths.tolist(), width)):
            noted = self._stacked(found[number * layers : (number + 1) * layers])
            for row, of_row in zip(rows, noted.reshape(len(rows), wide, *self._table.shape[2:]), strict=True):
                self._table[slots[row], : lengths[row]] = of_row[: lengths[row]]

    @contextmanager
    def decoding(self, positions: np.ndarray) -> Iterator[None]:
        """Around the pass of one token at ``positions[i]`` for each of the first slots."""
        with self._model.recorder.noting() as found:
            yield
        self._table[np.arange(len(positions)), positions] = self._stacked(found)

    def of(self, slot: int, first: int, length: int) -> np.ndarray:
        """`experience.Trajectory.routing` of a slot's tokens from ``first`` on, the last of which was not run."""
        found = self._table[slot, first:length].copy()
        found[-1] = unknown(found.dtype)
        return found

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copies the ``source`` slots over the ``target`` slots."""
        self._table[target] = self._table[source]

    def _stacked(self, found: list[torch.Tensor]) -> np.ndarray:
        return torch.stack(found, 1).cpu().numpy().astype(self._table.dtype)
