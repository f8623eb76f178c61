"""The half of an engine that submits, waits and aborts, with continuations that end when the test says so."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from penstock.protocols.experience import Sampling
from penstock.services.rollout.engines.asynchronous import AsyncEngine
from penstock.services.rollout.engines.base import Completion, EngineError, Refusal, Request, RequestError
from tests.weights.channel import until


class Waiting(AsyncEngine):
    """Prompts say what happens: [1] answers, [2] is refused, [3] breaks the engine, [4] waits for ever."""

    def __init__(self) -> None:
        super().__init__("waiting", 10, 20, 100)
        self.cancelled = 0
        self.seeds: list[int] = []

    async def generate(self, request: Request, sample: int, seed: int) -> Completion:
        self.seeds.append(seed)
        kind = int(request.tokens[0])
        if kind == 2:
            raise RequestError("not this one")
        if kind == 3:
            raise OSError("the wire is cut")
        if kind == 4:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        one = np.ones(1, np.int32)
        return Completion(request.number, sample, one, -one.astype(np.float32), one * self.version, "stop")


def request(number: int, kind: int) -> Request:
    return Request(number, 5, np.array([kind], np.int32), Sampling(n=3))


def drain(engine: Waiting) -> list[Completion | Refusal]:
    done: list[Completion | Refusal] = []
    until(lambda: done.extend(engine.step()) or not engine.pending(), 10, "the engine")
    return done


def test_requests_wait_for_the_first_weights_and_keep_their_seeds() -> None:
    engine = Waiting()
    engine.submit(request(1, 1))
    assert engine.step() == [] and engine.pending() == engine.early == 3
    engine.serve(0)
    assert {(c.number, c.sample) for c in drain(engine)} == {(1, 0), (1, 1), (1, 2)}
    first, engine.seeds = sorted(engine.seeds), []
    engine.submit(request(1, 1))
    drain(engine)
    assert sorted(engine.seeds) == first and len(set(first)) == 3
    engine.end()


def test_a_refused_request_costs_itself_alone() -> None:
    engine = Waiting()
    engine.serve(0)
    engine.submit(request(1, 2))
    engine.submit(request(2, 1))
    done = drain(engine)
    assert [r for r in done if isinstance(r, Refusal)] == [Refusal(1, "not this one")]
    assert sum(isinstance(r, Completion) and r.number == 2 for r in done) == 3
    engine.end()


def test_an_aborted_request_may_be_submitted_again() -> None:
    engine = Waiting()
    engine.serve(0)
    engine.submit(request(1, 4))
    engine.step()
    engine.abort(1)
    assert engine.pending() == 0
    until(lambda: engine.cancelled == 3, 5, "the tasks to be cancelled")
    engine.submit(request(1, 1))
    assert len(drain(engine)) == 3
    engine.end()


def test_a_broken_engine_says_so_at_every_call() -> None:
    engine = Waiting()
    engine.serve(0)
    engine.submit(request(1, 3))
    with pytest.raises(EngineError, match="waiting failed: group 1, sample .*the wire is cut"):
        drain(engine)

    async def never() -> None:
        await asyncio.sleep(3600)

    with pytest.raises(EngineError, match="the wire is cut"):
        engine.call(never(), 60, "answer")
    engine.end()


def test_every_call_has_a_deadline_that_is_named() -> None:
    async def never() -> None:
        await asyncio.sleep(3600)

    engine = Waiting()
    with pytest.raises(EngineError, match=r"waiting did not answer within 0\.2 s"):
        engine.call(never(), 0.2, "answer")
    engine.end()
