"""What a reward function does wrong costs its own trajectory, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

import psutil
import pytest

from penstock.services.reward.config import FunctionConfig
from penstock.services.reward.pool import FunctionError, Item, Pool

HERE = "tests.reward.functions"


def score(function: FunctionConfig, responses: list[str], workers: int = 1) -> list[float | str]:
    pool = Pool([function], workers)
    items = [Item(0, response, "t", "p", Future()) for response in responses]
    pool.submit(items)
    found: list[float | str] = []
    for item in items:
        error = item.future.exception(60)
        found.append(str(error) if error else item.future.result())
    pool.close()
    return found


def test_options_and_prints_do_no_harm() -> None:
    function = FunctionConfig(function=f"{HERE}:good", options={"bonus": 0.5})
    assert score(function, ["t", "x"]) == [1.5, 0.5]


def test_each_misbehaviour_costs_only_itself() -> None:
    function = FunctionConfig(function=f"{HERE}:misbehaving", timeout_s=1.0)
    responses = ["ok", "raise", "ok", "hang", "ok", "crash", "ok", "nan", "ok", "text", "ok"]
    found = score(function, responses)
    assert [f for f, r in zip(found, responses, strict=True) if r == "ok"] == [1.0] * 6
    wrong = {r: f for f, r in zip(found, responses, strict=True) if r != "ok"}
    assert wrong == {
        "raise": "raised RuntimeError: no idea",
        "hang": "timed out after 1 s",
        "crash": "crashed with exit code 3",
        "nan": "returned nan",
        "text": "returned str, not a number",
    }


def test_async_functions_run_together_each_with_its_own_timeout() -> None:
    started = time.monotonic()
    found = score(FunctionConfig(function=f"{HERE}:slow", timeout_s=2.0), ["a"] * 20 + ["hang"])
    assert found == [1.0] * 20 + ["timed out after 2 s"]
    assert time.monotonic() - started < 20 * 0.3 + 2


@pytest.mark.parametrize("name", [f"{HERE}:missing", "no.such.module:f"])
def test_a_function_that_cannot_be_loaded_is_named(name: str) -> None:
    with pytest.raises(FunctionError, match="cannot load"):
        Pool([FunctionConfig(function=name)], 1)


def test_no_worker_is_left_behind() -> None:
    pool = Pool([FunctionConfig(function=f"{HERE}:good")], 2)
    children = psutil.Process().children()
    assert len(children) >= 2
    pool.close()
    assert not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda f: f("exact_match")(" ab ", "ab", ""), 1.0),
        (lambda f: f("exact_match")("ba", "ab", ""), 0.0),
        (lambda f: f("number")("so it is 1,234.", "reason #### 1234", ""), 1.0),
        (lambda f: f("number")("I do not know", "#### 3", ""), 0.0),
        (lambda f: f("number")("-7", "7", ""), 0.0),
    ],
)
def test_registered_functions(call: Callable, expected: float) -> None:
    from importlib import import_module

    from penstock.services.reward.config import REGISTRY

    def find(name: str) -> Callable:
        module, _, function = REGISTRY[name].partition(":")
        return getattr(import_module(module), function)

    assert call(find) == expected
