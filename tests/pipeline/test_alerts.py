"""What the page says that one should look at while a run goes on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.pipeline.config import load
from penstock.pipeline.page.alerts import READ, alerts, sessions


def beat(time: float, pid: int = 7, silent_s: float = 0.1, **more: Any) -> dict[str, Any]:
    member = {"kind": "rollout", "pid": pid, "silent_s": silent_s}
    return {"time": time, "actors": {"rollout-0": member, **more}, "queues": {"leased": 8, "ready": 0}}


def seconds(first: int, last: int) -> list[dict[str, Any]]:
    return [beat(float(second)) for second in range(first, last + 1)]


def step(number: int, **values: Any) -> dict[str, Any]:
    usual = {"reward": 0.5, "grad_norm": 1.0, "wait_s": 0.5, "train_step_s": 0.5}
    return {"step": number, "time": 100.0 + number} | usual | values


QUIET = [step(number) for number in range(30)]
FAR = {"mismatch_kl_k3": 0.2, "mismatch_bound": 0.1}
NOW = 130.0


@pytest.mark.parametrize(
    "said, steps, beats",
    [
        ("noted nothing for 50 s", QUIET, [beat(80.0)]),
        ("rollout-1 was there less than 60 s ago", QUIET, [beat(100.0, **{"rollout-1": {"pid": 1}}), beat(129.0)]),
        ("rollout-9 is not heard of for 90 s", QUIET, [beat(129.0) | {"lost": {"rollout-9": 90.0}}]),
        ("rollout-0 is not heard of for 20 s", QUIET, [beat(129.0, silent_s=20.0)]),
        ("rollout-0 has died within", QUIET, [beat(120.0), beat(129.0, pid=8)]),
        ("no step was completed for 121 s (usually 1.0 s); groups: 8 leased", QUIET[:10], seconds(100, 229)),
        ("2 of the last 10 steps changed no weight", [*QUIET, step(30, skipped=1), step(31, skipped=1)], []),
        ("disagreed in 10 of the last 10 steps", [step(n, **FAR, mismatch_fresh_kl_k3=0.2) for n in range(30)], []),
        ("moved far from the versions", [step(n, **FAR, mismatch_fresh_kl_k3=0.01) for n in range(30)], []),
        (
            "0.2 in the last 10 steps, 0.9 at its best",
            [step(n, reward=[0.1, 0.9, 0.2][n // 10]) for n in range(30)],
            [],
        ),
        ("a gradient of norm 30", [*QUIET, step(30, grad_norm=30.0)], []),
        ("a gradient of norm 30", [*QUIET, step(30, grad_norm=math.nan), step(31, grad_norm=30.0)], []),
    ],
)
def test_a_page_says_what_one_should_look_at(
    said: str, steps: list[dict[str, Any]], beats: list[dict[str, Any]]
) -> None:
    config = load(Path("configs/quickstart.yaml"), ["trainer.steps=100"])
    now = (beats[-1]["time"] + (50 if "noted" in said else 1)) if beats else NOW
    (found,) = alerts(config, [{name: row[name] for name in READ if name in row} for row in steps], beats, now)
    assert said in found


def test_a_page_has_nothing_to_say_of_a_run_that_goes_well() -> None:
    config = load(Path("configs/quickstart.yaml"), ["trainer.steps=100"])
    better = [step(number, reward=math.nan if number == 3 else number / 30) for number in range(30)]
    assert alerts(config, better, [beat(129.0)], NOW) == []
    assert alerts(config, [], [], NOW) == []
    noise = np.random.default_rng(0)
    for _ in range(50):
        flat = [step(number, reward=float(noise.normal(0.5, 0.03))) for number in range(100)]
        assert not [said for said in alerts(config, flat, [], NOW) if "fallen" in said]
    trainer = {"kind": "trainer", "silent_s": 0.1}
    one, other = ({"pid": pid, "trainer": trainer | {"pid": pid + 1}} for pid in (7, 70))
    soon = [*(beat(100.0 + n, **one) for n in range(9)), beat(118.0) | {"actors": {}}, beat(129.0, **other)]
    assert alerts(config, better, soon, NOW) == [], "nobody has died: it was stopped, and goes on"
    resumed = [beat(1000.0), beat(90_000.0), beat(90_001.0)]
    assert alerts(config, QUIET, resumed, 90_002.0) == [], "the last step is of the day before"
    assert "no step was completed for 899 s" in alerts(config, [], seconds(101, 1000), 1000.0)[0]


def test_a_long_run_is_one_session_however_far_apart_its_beats_are() -> None:
    """The file is thinned, the older the more, and of what is left every so many rows are kept."""
    times = [*np.arange(0.0, 80_000, 400), *np.arange(80_000.0, 100_000, 100), *np.arange(100_000.0, 100_120)]
    long = [beat(float(time)) for time in times]
    assert sessions(long) == [0] and sessions([]) == []
    config = load(Path("configs/quickstart.yaml"), ["trainer.steps=100"])
    assert "no step was completed for 100011 s" in alerts(config, QUIET[:10], long, 100_120.0)[0]
    gone_on = [*long, *(beat(120_000.0 + n) for n in range(9))]
    assert sessions(gone_on) == [0, len(long)]
