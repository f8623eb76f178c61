"""What every engine can do. Small, so that an engine is easy to add; asynchronous ones fit by polling in `step`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from protocols.experience import Finish, Sampling


class RequestError(ValueError):
    """A request that can never be served (too long, unknown option); costs only itself."""


@dataclass(frozen=True)
class Request:
    """``sampling.n`` continuations of one prompt. Sampling is keyed by seed, number, sample and position, so the same
    request gives the same tokens whatever else is in the batch, up to floating point."""

    number: int
    seed: int
    tokens: np.ndarray
    """int32 ``[prompt tokens]``"""
    sampling: Sampling


@dataclass(frozen=True)
class Completion:
    """One finished continuation."""

    number: int
    sample: int
    """0 to n - 1."""
    tokens: np.ndarray
    """int32 ``[new tokens]``, the end-of-sequence token included where it was sampled"""
    logprobs: np.ndarray
    """float32 ``[new tokens]``: under the tempered, untruncated distribution; greedy ones at temperature 1"""
    versions: np.ndarray
    """int32 ``[new tokens]``: the version that sampled each"""
    finish: Finish


@runtime_checkable
class Engine(Protocol):
    """A generator whose weights can be replaced between two decoding steps, with requests in flight.

    `prepare` and `score` may run in another thread while `step` runs; everything else is called from one thread.
    """

    device: torch.device
    """Where it computes."""

    version: int
    """The version it samples with; -1 before the first weights."""
    capacity: int
    """Continuations that it decodes at once."""

    def submit(self, request: Request) -> None:
        """Queues a request. Raises `RequestError` where it can never be served."""

    def step(self) -> list[Completion]:
        """Advances every running continuation, by one token where the engine decodes in steps; returns those that
        finished. Returns at once where there is nothing to do."""

    def abort(self, number: int) -> None:
        """Forgets a request and all its continuations."""

    def pending(self) -> int:
        """Continuations that are queued or running."""

    def prepare(self, weights: Mapping[str, Any]) -> Any:
        """Turns verified tensors (transformers' names, on the host) into whatever `swap` takes. It may keep the tensors
        as they are: they stay unchanged until another version was swapped in. It must not write to them."""

    def score(self, prepared: Any, tokens: np.ndarray) -> np.ndarray:
        """Log-probabilities (float32 ``[tokens - 1]``, temperature 1) of all ``tokens`` (int32) but the first, under
        weights that are not swapped in yet: what is made of a version is checked before it serves."""

    def swap(self, prepared: Any, version: int) -> None:
        """From now on, samples with these weights."""

    def gauges(self) -> dict[str, float]:
        """Numbers for the dashboard."""

    def close(self) -> None:
        """Releases what it holds."""
