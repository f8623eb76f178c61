"""Any process may be killed at any moment: nothing is lost, nothing trained on twice, no token too old."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.harness import SMALL, carry_out, schedule


@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.chaos)])
def test_a_short_run_survives(tmp_path: Path, seed: int) -> None:
    plan = schedule(seed, steps=24, count=4)
    assert plan.kills >= 6
    summary = carry_out(tmp_path, plan, [*SMALL, "trainer.steps=24"])
    assert summary["steps"] == 24 and summary["groups_trained"] == 24 * 8


@pytest.mark.chaos
@pytest.mark.parametrize("seed", [3, 4])
def test_a_run_that_shares_its_devices_survives(tmp_path: Path, seed: int) -> None:
    """Whoever is killed has them, wants them or sleeps."""
    summary = carry_out(
        tmp_path, schedule(seed, steps=24, count=4), [*SMALL, "trainer.steps=24", "run.placement=colocated"]
    )
    assert summary["steps"] == 24 and summary["groups_trained"] == 24 * 8


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(10, 14))
def test_more_short_runs_survive(tmp_path: Path, seed: int) -> None:
    summary = carry_out(tmp_path, schedule(seed, steps=40, count=6), [*SMALL, "trainer.steps=40"])
    assert summary["steps"] == 40 and summary["groups_trained"] == 40 * 8


@pytest.mark.chaos
def test_the_quickstart_learns_all_the_same(tmp_path: Path) -> None:
    summary = carry_out(tmp_path, schedule(20, steps=140, count=10), ["trainer.checkpoint.every=20"])
    assert summary["reward_last"] >= 0.88
    assert summary["groups_trained"] == 150 * 32
