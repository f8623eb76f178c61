"""PPO and PRIME with a critic, through the real command: what is killed is redone, and nothing is trained twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.pipeline.run.summary import steps_of
from penstock.services.runtime.failpoint import VARIABLE
from penstock.services.runtime.lines import read_lines
from tests import warm
from tests.chaos.harness import SMALL
from tests.e2e.runs import SHORT, Run, check_promises

PPO = ["trainer.algorithm.preset=ppo", "trainer.algorithm.advantage={lam: 0.95}", "critic.optimizer.lr=1.0e-3"]
PRIME = ["trainer.algorithm.preset=prime", "trainer.algorithm.advantage={share: 5.0}", "critic.optimizer.lr=1.0e-3"]
EVERY = ["trainer.checkpoint.every=4", "critic.checkpoint.every=3"]
DETERMINISTIC = ["run.deterministic=true", "replay.archive=all", "trainer.steps=12"]
DETERMINISTIC += ["trainer.checkpoint.every=5", "critic.checkpoint.every=4"]


def killed_at(points: str, folder: Path, overrides: list[str]) -> Run:
    os.environ[VARIABLE], os.environ["PENSTOCK_KILL_LOG"] = points, str(folder / "log")
    try:
        return Run(folder, overrides)
    finally:
        del os.environ[VARIABLE], os.environ["PENSTOCK_KILL_LOG"]


def last_of(path: Path) -> dict[int, str]:
    """Step to digest, each of which is the same however often the step was made."""
    rows = read_lines(path)
    found = {row["step"]: row["digest"] for row in rows}
    assert all(row["digest"] and found[row["step"]] == row["digest"] for row in rows), "a step came out different"
    return found


def test_every_step_waits_for_the_critics_values(tmp_path: Path) -> None:
    alone = [
        "rollout.sampling.n=1",
        "gate.groups_per_step=16",
        "reward.functions=[{function: 'tests.e2e.rewards:parity'}]",
    ]
    run = Run(tmp_path, [*SHORT, *PPO, *alone, "critic.warmup_steps=2"])
    check_promises(run.wait())
    rows = steps_of(run.folder)
    assert [row["step"] for row in rows] == list(range(6))
    learned = read_lines(run.folder / "critic.jsonl")
    assert [row["critic_step"] for row in learned] == list(range(6))
    assert learned[0]["critic_value_mean"] == 0 != learned[-1]["critic_value_mean"]
    assert all(row["groups_without_variance"] == 0 for row in rows)  # no answer is compared with another
    assert {path.name for path in (run.folder / "critic" / "checkpoints").iterdir()} == {"step-000006"}
    digests = [row["digest"] for row in read_lines(run.folder / "ledger.jsonl")]
    assert len(set(digests[:2])) == 1 and len(set(digests)) == 5, "the policy stands still for two steps"


def test_a_killed_critic_that_learns_from_outcomes_redoes_its_steps_to_the_bit(tmp_path: Path) -> None:
    points = "critic-taken:2,critic-valued:5,critic-trained:7"
    run = killed_at(points, tmp_path, [*SMALL, *PRIME, *DETERMINISTIC])
    summary = run.wait()
    check_promises(summary)
    assert summary["restarts"] == 3 and summary["steps"] == 12
    learned = last_of(run.folder / "critic.jsonl")
    assert sorted(learned) == list(range(12)) and len(set(learned.values())) == 12
    rows = steps_of(run.folder)
    assert abs(rows[0]["process"]) < 1e-7 < abs(rows[-1]["process"]), "it begins as the reference"
    assert all(0 <= row["critic_accuracy"] <= 1 for row in rows if "critic_accuracy" in row)


@pytest.mark.chaos
def test_a_critic_of_two_ranks_and_a_trainer_killed_in_the_middle_of_steps_redo_them_to_the_bit(tmp_path: Path) -> None:
    points = "critic-taken:2,critic-valued:3,trained:3,critic-trained:6,committed:9"
    several = ["trainer.epochs=2", "trainer.mini_batches=2", "critic.mini_batches=4"]
    several += ["trainer.algorithm.ratio=proximal"]
    several += ["trainer.algorithm.kl={coefficient: 0.05, place: reward, target: 0.01, horizon: 500}"]
    run = killed_at(points, tmp_path, [*SMALL, *PPO, *DETERMINISTIC, *several, "critic.ranks=2"])
    summary = run.wait()
    check_promises(summary)
    assert summary["restarts"] == 5 and summary["steps"] == 12
    coefficients = [row["kl_coefficient"] for row in steps_of(run.folder)]
    assert coefficients[0] == 0.05 and len(set(coefficients)) == 12, "it adapts, and a redo finds where it stood"
    done = warm.run("replay", str(run.folder))
    assert "12 of 12 versions have the recorded digest" in done.stdout, done.stdout + done.stderr
    assert sorted(last_of(run.folder / "critic.jsonl")) == list(range(12))


@pytest.mark.chaos
def test_killed_or_not_policy_and_critic_end_at_the_same_bits(tmp_path: Path) -> None:
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    plain.mkdir(), killed.mkdir()
    synchronous = [*SMALL, *PPO, *DETERMINISTIC, "gate.max_lag=0"]
    one, two = Run(plain, synchronous), killed_at("critic-valued:4,trained:6", killed, synchronous)
    check_promises(one.wait()), check_promises(two.wait())
    assert last_of(one.folder / "critic.jsonl") == last_of(two.folder / "critic.jsonl")
    for name in ("checkpoints", "critic/checkpoints"):
        files = [found.folder / name / "step-000012" / "model.safetensors" for found in (one, two)]
        assert files[0].read_bytes() == files[1].read_bytes(), name


@pytest.mark.chaos
def test_a_run_of_which_everybody_died_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path, [*SHORT, *PPO, "trainer.steps=100000", *EVERY])
    run.wait_for_step(7)
    for process in [*run.actors().values(), run.process]:
        process.kill()
    run.process.wait(10)
    other = Run.resumed(run, ["trainer.steps=14", "trainer.algorithm={preset: null, advantage: {type: grpo}}"])
    assert other.process.wait(60) == 2
    assert "trainer.algorithm.advantage: grpo, but the run has a critic that says values; a" in other.output.read_text()
    again = Run.resumed(run, ["trainer.steps=14"])
    summary = again.wait()
    check_promises(summary)
    assert summary["steps"] == 14
