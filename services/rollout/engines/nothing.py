"""The engine of rollouts that only hand on given answers: it has no model, and is sent no weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import torch

from penstock.services.rollout.engines.base import Completion, EngineError, Refusal, Request, RequestError
from penstock.services.weights.receiver.loader import MappedVersion

SEQUENCES = 256
"""Answers that are asked for ahead of the trainer; they take no more room than their tokens."""


class NoEngine:
    """See `base.Engine`. What it cannot do it refuses; nobody asks for it where the config was looked at."""

    device, remote, version, capacity = torch.device("cpu"), False, -1, SEQUENCES

    def submit(self, request: Request) -> None:
        """See `Engine.submit`."""
        raise RequestError("rollout.engine.type=none samples nothing; take another, e.g. torch")

    def step(self) -> list[Completion | Refusal]:
        """See `Engine.step`."""
        return []

    def abort(self, number: int) -> None:
        """See `Engine.abort`."""

    def pending(self) -> int:
        """See `Engine.pending`."""
        return 0

    def swap(self, prepared: Any, version: int) -> None:
        """See `Engine.swap`."""
        self._no_weights()

    def prepare(self, weights: Mapping[str, Any], memory: MappedVersion | None = None) -> Any:
        """See `WeightLoader.prepare`."""
        self._no_weights()

    def score(self, prepared: Any, tokens: np.ndarray) -> np.ndarray:
        """See `WeightLoader.score`."""
        self._no_weights()

    def gauges(self) -> dict[str, float]:
        """See `Engine.gauges`."""
        return {}

    def close(self) -> None:
        """See `Engine.close`."""

    def _no_weights(self) -> NoReturn:
        raise EngineError("rollout.engine.type=none has no model, and is to be sent no version")
