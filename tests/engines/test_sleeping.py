"""Engines that leave their device to others for a while: nothing that runs is lost, and no token is other than it
would be."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from penstock.services.modeling.version_weights import version_of
from penstock.services.rollout.engines.base import SleepingEngine
from tests.engines.test_conformance import check
from tests.engines.workbench import Workbench


@pytest.fixture
def sleeper(bench: Workbench) -> SleepingEngine:
    if not isinstance(bench.engine, SleepingEngine):
        pytest.skip("this engine cannot sleep")
    return bench.engine


def test_what_runs_goes_on(bench: Workbench, sleeper: SleepingEngine) -> None:
    random = np.random.default_rng(0)
    requests = {r.number: r for r in (bench.request(random, max_new_tokens=60) for _ in range(4))}
    lost, late = (bench.request(random, max_new_tokens=60) for _ in range(2))
    for request in (*requests.values(), lost):
        sleeper.submit(request)
    before = bench.generated()
    done = bench.step_until(lambda: bench.generated() >= before + 60)
    sleeper.sleep()
    sleeper.submit(late)
    sleeper.abort(lost.number)
    generated, pending = bench.generated(), sleeper.pending()
    time.sleep(0.3)
    assert (bench.generated(), sleeper.pending()) == (generated, pending) and pending
    sleeper.wake()
    done += bench.drain()
    requests[late.number] = late
    assert {(c.number, c.sample) for c in done} == {(number, sample) for number in requests for sample in (0, 1)}
    for completion in done:
        check(bench, requests[completion.number].tokens, completion)


def test_a_version_that_has_come_meanwhile_serves_at_once(bench: Workbench, sleeper: SleepingEngine) -> None:
    first = bench.publish(0)
    request = bench.request(np.random.default_rng(1), n=2, max_new_tokens=60)
    sleeper.submit(request)
    before = bench.generated()
    done = bench.step_until(lambda: bench.generated() >= before + 20)
    sleeper.sleep()
    generated = bench.generated()
    getattr(sleeper, "wake_to_load", sleeper.wake)()
    if hasattr(sleeper, "wake_to_load"):
        time.sleep(0.5)
        assert bench.generated() == generated, "nothing is computed with the version before"
    second = bench.publish(1)
    done += bench.drain()
    assert {int(v) for c in done for v in c.versions} == {first, second}
    for completion in done:  # keys and values were computed again, so it is exact behind the boundary too
        check(bench, request.tokens, completion)
    bench.publish(0)


def test_asleep_it_holds_next_to_nothing(bench: Workbench, sleeper: SleepingEngine, options: dict[str, Any]) -> None:
    if options["type"] != "torch":
        pytest.skip("of the embedded engine")
    model: Any = sleeper._model  # type: ignore[attr-defined]
    before = {tensor.data_ptr() for tensor in model.kept}
    coming = sleeper.prepare({name: each + 0 for name, each in version_of(bench.models[1]).items()})
    assert {tensor.data_ptr() for tensor in model.kept} > before, "a version that has come, and does not serve yet"
    del coming
    held = [*model.cached, *(model.kept if model.cached[0].is_cuda else ())]
    sleeper.sleep()
    assert not sum(t.untyped_storage().nbytes() for t in held)
    sleeper.wake()
    assert all(t.untyped_storage().nbytes() for t in held)
