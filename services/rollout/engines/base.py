"""What every engine can do. Small, so that an engine is easy to add; asynchronous ones fit by polling in `step`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from protocols.experience import Finish, Sampling, nothing_kept
from protocols.weights import Layout
from services.weights import flat


class RequestError(ValueError):
    """A request that can never be served (too long, unknown option); costs only itself."""


class EngineError(RuntimeError):
    """The engine is dead or does not answer; says which part, and for how long. The rollout is started again."""


def refuse_partial(names: Collection[str]) -> None:
    """Raises `EngineError` where a matrix that engines fuse would arrive in part: they would serve wrong weights."""
    for name in names:
        for family in flat.FUSED:
            for member in family:
                if f".{member}." in name:
                    missing = [m for m in family if name.replace(f".{member}.", f".{m}.") not in names]
                    if missing:
                        raise EngineError(
                            f"{name} comes without its {' and '.join(missing)}, which engines fuse with it"
                        )


@dataclass(frozen=True)
class Memory:
    """Where another process of this host finds a version."""

    path: str
    """A file that it can map."""
    offset: int
    """Where in the file the flat buffer begins."""
    layout: Layout


@dataclass(frozen=True)
class Request:
    """``sampling.n`` continuations of one prompt. Sampling is keyed by seed, number, sample and position, so the same
    request gives the same tokens whatever else is in the batch, up to floating point."""

    number: int
    seed: int
    tokens: np.ndarray
    """int32 ``[prompt tokens]``"""
    sampling: Sampling


def refuse_unfit(request: Request, vocabulary: int, max_length: int) -> None:
    """Raises `RequestError` where its ids are not the model's, or prompt and response could exceed ``max_length``."""
    size, new = len(request.tokens), request.sampling.max_new_tokens
    if size < 1 or request.tokens.min() < 0 or request.tokens.max() >= vocabulary:
        raise RequestError(f"the prompt has {size} tokens or ids outside the vocabulary of {vocabulary}")
    if size + new > max_length:
        raise RequestError(
            f"a prompt of {size} tokens and max_new_tokens={new} exceed rollout.engine.max_length={max_length}"
        )


@dataclass(frozen=True)
class Completion:
    """One finished continuation."""

    number: int
    sample: int
    """0 to n - 1."""
    tokens: np.ndarray
    """int32 ``[new tokens]``, the end-of-sequence token included where it was sampled"""
    logprobs: np.ndarray
    """float32 ``[new tokens]``: under the tempered, untruncated distribution, with `Sampling.masks` the truncated one;
    greedy ones at temperature 1"""
    versions: np.ndarray
    """int32 ``[new tokens]``: the version that sampled each"""
    finish: Finish
    kept_counts: np.ndarray = field(default_factory=nothing_kept)
    """int32 ``[new tokens]``, where `Sampling.masks` asks for it: how many tokens each was chosen from, 0 for all"""
    kept_ids: np.ndarray = field(default_factory=nothing_kept)
    """int32 ``[sum of kept_counts]``"""


@dataclass(frozen=True)
class Refusal:
    """A request that turned out to be one that can never be served, after it was submitted."""

    number: int
    reason: str


@runtime_checkable
class Engine(Protocol):
    """A generator whose weights can be replaced between two decoding steps, with requests in flight.

    `prepare` and `score` may run in another thread while `step` runs; everything else is called from one thread.
    """

    device: torch.device
    """Where `prepare` wants the weights."""
    remote: bool
    """Its weights lie in processes of its own, and a version is loaded over the one that serves. So `prepare` is told
    where they find it, and `score` can be asked only after `swap`; until the score is right, nothing that was finished
    since then leaves the rollout."""

    version: int
    """The version it samples with; -1 before the first weights."""

    @property
    def capacity(self) -> int:
        """Continuations that it decodes at once; may change with what its memory has room for."""

    def submit(self, request: Request) -> None:
        """Queues a request. Raises `RequestError` where it can never be served."""

    def step(self) -> list[Completion | Refusal]:
        """Advances every running continuation, by one token where the engine decodes in steps; returns those that
        finished. Returns at once, or after some milliseconds, where there is nothing to do. Raises `EngineError`."""

    def abort(self, number: int) -> None:
        """Forgets a request and all its continuations."""

    def pending(self) -> int:
        """Continuations that are queued or running."""

    def prepare(self, weights: Mapping[str, Any], memory: Memory | None = None) -> Any:
        """Turns verified tensors (transformers' names, on the host) into whatever `swap` takes. It may keep the tensors
        as they are: they stay unchanged until another version was swapped in. It must not write to them. ``memory``
        says where they lie, where the engine is `remote` and they are in memory that can be shared."""

    def score(self, prepared: Any, tokens: np.ndarray) -> np.ndarray:
        """Log-probabilities (float32 ``[tokens - 1]``, temperature 1) of all ``tokens`` (int32) but the first, under
        weights that are not swapped in yet (`remote`: that are): what is made of a version is checked before it
        serves."""

    def swap(self, prepared: Any, version: int) -> None:
        """From now on, samples with these weights. Raises `EngineError` where they cannot be loaded."""

    def gauges(self) -> dict[str, float]:
        """Numbers for the dashboard. Asked about once a second, also while nothing is pending. Raises `EngineError`."""

    def close(self) -> None:
        """Releases what it holds."""
