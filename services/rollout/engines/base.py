"""What every engine can do. Small, so that an engine is easy to add; asynchronous ones fit by polling in `step`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from penstock.protocols.experience import Finish, Sampling, no_candidates
from penstock.protocols.keys import ClientKeys
from penstock.protocols.routing import no_routing
from penstock.services.modeling.version_weights import weight_names
from penstock.services.weights.config import WeightsConfig
from penstock.services.weights.layout import FUSED
from penstock.services.weights.receiver.loader import WeightLoader

BLIND = "the prompt shows pictures, and this engine hands none to its model; use rollout.engine.type=torch or vllm"


class RequestError(ValueError):
    """A request that can never be served (too long, unknown option); costs only itself."""


class EngineError(RuntimeError):
    """The engine is dead or does not answer; says which part, and for how long. The rollout is started again."""


def refuse_partial(names: Collection[str], path: str) -> None:
    """Raises `EngineError` where a matrix that engines fuse would arrive in part, of those that the model at ``path``
    has: they would serve wrong weights. What is to be merged with a whole model may."""
    for name in names:
        if ".lora_" in name:
            continue
        for family in FUSED:
            for member in family:
                if f".{member}." in name:
                    others = {m: name.replace(f".{member}.", f".{m}.") for m in family}
                    lacking = [m for m in family if others[m] not in names]
                    if missing := [m for m in lacking if others[m] in weight_names(path)]:
                        raise EngineError(
                            f"{name} comes without its {' and '.join(missing)}, which engines fuse with it"
                        )


@dataclass(frozen=True)
class Request:
    """``sampling.n`` continuations of one prompt. Sampling is keyed by seed, stream, sample and position, so the same
    request gives the same tokens whatever else is in the batch, up to floating point."""

    number: int
    seed: int
    tokens: np.ndarray
    """int32 ``[prompt tokens]``"""
    sampling: Sampling
    of: int | None = None
    """What sampling is keyed by in the place of `number`."""
    known: int = 0
    """Tokens at the beginning whose experts need not be said: see `Completion.routing`."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end an answer, besides the engine's own: those of `Sampling.stop` that no decoded text shows."""
    pictures: tuple[bytes, ...] = ()
    """What the tokens show: see `Trajectory.pictures`."""
    sampled: np.ndarray | None = None
    """bool ``[prompt tokens]``: which of them the policy has sampled in earlier turns; None: none."""
    unread: bool = False
    """Nobody computes with its log-probabilities, an evaluation's: they may be of another temperature or truncation."""

    @property
    def stream(self) -> int:
        """What sampling is keyed by."""
        return self.number if self.of is None else self.of


def refuse_unfit(request: Request, vocabulary: int, max_length: int, blind: str = BLIND) -> None:
    """Raises `RequestError` where its ids are not the model's, prompt and response could exceed ``max_length``, a stop
    text is empty, which every answer would contain, or it shows pictures, by the words of ``blind``; empty: it may."""
    size, new = len(request.tokens), request.sampling.max_new_tokens
    if size < 1 or request.tokens.min() < 0 or request.tokens.max() >= vocabulary:
        raise RequestError(f"the prompt has {size} tokens or ids outside the vocabulary of {vocabulary}")
    if not 0 <= request.known < size:
        raise RequestError(f"the experts of {request.known} tokens are called known, of a prompt of {size}")
    if "" in request.sampling.stop:
        raise RequestError("one of the texts that end an answer is empty; leave it out")
    if request.pictures and blind:
        raise RequestError(blind)
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
    """float32 ``[new tokens]``: under the tempered, untruncated distribution, with `Sampling.candidates` the truncated
    one; greedy ones at temperature 1"""
    versions: np.ndarray
    """int32 ``[new tokens]``: the version that sampled each"""
    finish: Finish
    candidate_counts: np.ndarray = field(default_factory=no_candidates)
    """int32 ``[new tokens]``, where `Sampling.candidates` asks for it: how many tokens each was chosen from, 0 for
    all"""
    candidate_ids: np.ndarray = field(default_factory=no_candidates)
    """int32 ``[sum of candidate_counts]``"""
    routing: np.ndarray = field(default_factory=no_routing)
    """Where `Sampling.routing_replay` asks for it, `experience.Trajectory.routing` of the prompt's tokens from
    `Request.known` on, and of the new ones: as each was run first."""


@dataclass(frozen=True)
class Refusal:
    """A request that turned out to be one that can never be served, after it was submitted."""

    number: int
    reason: str


@runtime_checkable
class Engine(WeightLoader, Protocol):
    """A generator whose weights can be replaced between two decoding steps, with requests in flight.

    A `WeightLoader`'s `prepare` and `score` may run in another thread while `step` runs; everything else is called from
    one thread.
    """

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

    def swap(self, prepared: Any, version: int) -> None:
        """From now on, samples with these weights. Raises `EngineError` where they cannot be loaded."""

    def gauges(self) -> dict[str, float]:
        """Numbers for the dashboard. Asked about once a second, also while nothing is pending. Raises `EngineError`."""

    def close(self) -> None:
        """Releases what it holds."""


@runtime_checkable
class DrainingEngine(Engine, Protocol):
    """An engine in which everything must have ended before it swaps, which may take minutes."""

    def drained(self) -> bool:
        """Whether `swap` would begin at once. Once asked, nothing new is begun until then. Raises `EngineError`."""


@runtime_checkable
class SleepingEngine(Engine, Protocol):
    """An engine that can leave its device to others for a while (`run.placement`: colocated). Asleep, it is asked to
    submit, abort, pending, gauges and close, and for nothing else."""

    def sleep(self) -> None:
        """Stops, keeps what is running and queued, and gives the device's memory back: weights lie on the host then,
        keys and values are forgotten. Raises `EngineError`."""

    def wake(self) -> None:
        """Goes on, with the version that it had; keys and values are computed again. Raises `EngineError`. One that has
        a method `wake_to_load`, too, is woken by that where a `swap` follows, before which it is to compute nothing."""


@runtime_checkable
class WorkerEngine(Engine, Protocol):
    """An engine whose weights lie in processes of its own, which receive versions by themselves: its `swap` also takes
    a `ReceivedVersion`."""

    workers: int
    """Processes that hold weights."""

    def join_workers(self, address: str, weights: WeightsConfig, keys: ClientKeys | None) -> None:
        """Has each of them connect to the rollout's desk at ``address``. Raises `EngineError`."""
