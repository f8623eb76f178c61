"""Whole runs by the real command: short ones, and what goes wrong in them."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.summary import steps_of
from tests.e2e.runs import QUICKSTART, ROOT, SHORT, Run, check_promises

FIELDS = """
    steps version reward_first reward_last eval_before eval_after max_lag lag_max_seen groups_leased groups_finished
    groups_trained groups_dropped groups_lost groups_trained_twice generated_tokens trained_tokens wall_s restarts
""".split()  # noqa: SIM905


def test_a_short_run_leaves_everything_it_should(tmp_path: Path) -> None:
    run = Run(tmp_path, [*SHORT, "run.tensorboard=true", "prompts.eval_every=3"])
    summary = run.wait()
    check_promises(summary)
    assert set(FIELDS) <= summary.keys()
    assert summary["steps"] == summary["version"] == 6 and summary["groups_trained"] == 48
    assert [row["step"] for row in steps_of(run.folder)] == list(range(6))
    report = (run.folder / "report.html").read_text()
    assert report.count("<svg") == 7 and "http://" not in report.split("</style>")[1].split("<svg")[0]
    assert (run.folder / "samples.jsonl").read_text() and list((run.folder / "tensorboard").iterdir())
    lines = (run.folder / "logs" / "trainer.jsonl").read_text().splitlines()
    assert all({"run", "actor", "event"} <= json.loads(line).keys() for line in lines)
    checkpoint = run.folder / "checkpoints" / "step-000006"
    assert (checkpoint / "model.safetensors").is_file() and (checkpoint / "tokenizer.json").is_file()


def test_zero_lag_trains_on_nothing_old(tmp_path: Path) -> None:
    summary = Run(tmp_path, [*SHORT, "gate.max_lag=0"]).wait()
    check_promises(summary)
    assert summary["lag_max_seen"] == 0 and summary["lagging_share"] == 0


def test_weights_travel_by_gloo(tmp_path: Path) -> None:
    summary = Run(tmp_path, [*SHORT, "weights.transport=gloo"]).wait()
    check_promises(summary)
    assert summary["version"] == 6


def test_misbehaving_rewards_are_counted_drops(tmp_path: Path) -> None:
    functions = "[{function: 'tests.e2e.rewards:moody', timeout_s: 1.0}]"
    summary = Run(tmp_path, [*SHORT, f"reward.functions={functions}"]).wait()
    check_promises(summary)
    assert summary["reward_errors"] > 0 and summary["steps"] == 6


def test_a_reward_that_always_fails_ends_the_run_and_says_why(tmp_path: Path) -> None:
    run = Run(tmp_path, [*SHORT, "reward.functions=[{function: 'tests.e2e.rewards:broken'}]"])
    assert run.process.wait(120) == 1
    output = run.output.read_text()
    assert "groups were dropped in a row" in output and "raised KeyError" in output
    assert not run.actors()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["gate.max_lagg=1"], "unknown key; did you mean 'max_lag'"),
        (["store.url=redis://127.0.0.1:1", "store.retry_s=1"], "no Redis answers at redis://127.0.0.1:1"),
        (["reward.functions=[{function: 'tests.e2e.rewards:missing'}]"], "cannot load tests.e2e.rewards:missing"),
        (
            ["prompts.train={type: hub, path: json, files: [nowhere.jsonl]}", "model={type: pretrained, path: x}"],
            "no such file: nowhere.jsonl",
        ),
        (["model={type: pretrained, path: /nowhere}"], "model.path: cannot load"),
        (["trainer.algorithm.loss={type: custom, function: 'no.such:thing'}"], "cannot load 'no.such:thing'"),
    ],
)  # fmt: skip
def test_what_cannot_work_fails_soon_and_clearly(tmp_path: Path, overrides: list[str], message: str) -> None:
    run = Run(tmp_path, [*SHORT, *overrides])
    assert run.process.wait(120) in (1, 2)
    assert message in run.output.read_text()
    assert not run.actors()


def test_a_busy_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = Run(tmp_path, [*SHORT, f"broker.bind=tcp://127.0.0.1:{taken.getsockname()[1]}"])
        assert run.process.wait(120) == 1
    assert "broker.bind: cannot bind" in run.output.read_text()


def test_ctrl_c_saves_a_checkpoint_and_leaves_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, [*SHORT, "trainer.steps=100000"])
    run.wait_for_step(3)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(60) == 130, run.output.read_text()
    assert not run.actors()
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["outcome"] == "interrupted" and summary["groups_lost"] == 0
    assert (run.folder / "checkpoints" / f"step-{summary['steps']:06d}").is_dir()


def test_actors_end_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    run = Run(tmp_path, [*SHORT, "trainer.steps=100000"])
    run.wait_for_step(2)
    run.process.kill()
    run.process.wait()
    deadline = time.monotonic() + 40
    while run.actors() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not run.actors()


def test_actors_can_be_started_one_by_one(tmp_path: Path, redis_url: str) -> None:
    folder = tmp_path / "run"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    overrides = [*SHORT, f"store.url={redis_url}", f"broker.bind=tcp://127.0.0.1:{port}"]
    command = [sys.executable, "-m", "pipeline.cli"]
    subprocess.run([*command, "prepare", str(QUICKSTART), *SHORT, "--folder", str(folder)], check=True, cwd=ROOT)
    actors = []
    for actor in ("broker", "trainer", "rollout", "reward", "reference"):
        arguments = ["serve", actor, "--config", str(QUICKSTART), "--folder", str(folder), "--name", actor, *overrides]
        if actor != "broker":
            arguments += ["--broker", f"tcp://127.0.0.1:{port}"]
        actors.append(subprocess.Popen([*command, *arguments], cwd=ROOT))
    assert [actor.wait(120) for actor in actors] == [0] * 5
    assert len(steps_of(folder)) == 6
