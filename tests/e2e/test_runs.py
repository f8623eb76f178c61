"""Whole runs by the real command: short ones, and what goes wrong in them."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import redis
from typer.testing import CliRunner

from penstock.pipeline import cli
from penstock.pipeline.run.summary import steps_of
from penstock.services.runtime import checkpoint_folders
from penstock.services.runtime.lines import read_lines
from tests import warm
from tests.e2e.documented import undocumented
from tests.e2e.runs import QUICKSTART, ROOT, SHORT, WHOLE, Run, check_promises, free_port, page_of

FIELDS = """
    steps version reward_first reward_last eval_before eval_after max_lag lag_max_seen groups_leased groups_finished
    groups_trained groups_dropped groups_lost groups_trained_twice generated_tokens trained_tokens wall_s restarts
""".split()  # noqa: SIM905


def test_a_short_run_leaves_everything_it_should(tmp_path: Path) -> None:
    watched = ["run.trackers=[tensorboard]", "run.tracker_samples=2"]
    run = Run(tmp_path, [*WHOLE, *watched, "prompts.eval_every=3", "trainer.profile_steps=[4]"])
    summary = run.wait()
    check_promises(summary)
    assert set(FIELDS) <= summary.keys()
    assert summary["steps"] == summary["version"] == 6 and summary["groups_trained"] == 48
    assert [row["step"] for row in steps_of(run.folder)] == list(range(6))
    page = page_of(run.folder / "report.html")
    assert page["summary"]["outcome"] == "complete" and page["steps"]["step"] == list(range(6))
    actors = set(page["beats"]["actors"])  # of a run so short one may have joined after the last look
    assert page["groups"] and page["loads"]["version"] and "trainer" in actors and {"rollout-0", "rollout-1"} & actors
    (events,) = (run.folder / "tensorboard").iterdir()
    assert (run.folder / "samples.jsonl").read_text() and events.read_bytes().count(b"samples/text_summary") == 6
    lines = (run.folder / "logs" / "trainer.jsonl").read_text().splitlines()
    assert all({"run", "actor", "event"} <= json.loads(line).keys() for line in lines)
    assert not undocumented(run.folder)
    (profile,) = (run.folder / "profiles").iterdir()
    with gzip.open(profile, "rt") as trace:
        assert {"aten::mm", "Optimizer.step#AdamW.step"} <= {event["name"] for event in json.load(trace)["traceEvents"]}
    checkpoint = run.folder / "checkpoints" / "step-000006"
    assert (checkpoint / "model.safetensors").is_file() and (checkpoint / "tokenizer.json").is_file()


@pytest.mark.chaos
def test_zero_lag_trains_on_nothing_old(tmp_path: Path) -> None:
    summary = Run(tmp_path, [*SHORT, "gate.max_lag=0"]).wait()
    check_promises(summary)
    assert summary["lag_max_seen"] == 0 and summary["lagging_share"] == 0


@pytest.mark.chaos
def test_weights_travel_by_gloo(tmp_path: Path) -> None:
    summary = Run(tmp_path, [*SHORT, "weights.transport=gloo"]).wait()
    check_promises(summary)
    assert summary["version"] == 6


class Judge(BaseHTTPRequestHandler):
    """Answers 429, 500, HTML, or after a minute, to a few questions each; else a grade."""

    asked = itertools.count(1)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        turn = next(self.asked)
        code = {5: 429, 9: 500}.get(turn, 200)
        body = json.dumps({"choices": [{"message": {"content": "7"}}]}).encode()
        if turn % 20 == 13:
            body = b"<html>busy</html>"
        if turn == 17:
            time.sleep(60)
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def test_misbehaving_rewards_cost_their_own_trajectories_and_are_named(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    judge = f"{{function: judge, trial: false, timeout_s: 3.0, options: {{url: '{url}', model: m}}}}"
    functions = f"[{{function: 'tests.e2e.rewards:moody', timeout_s: 1.0}}, {judge}]"
    run = Run(tmp_path, [*SHORT, f"reward.functions={functions}"])
    summary = run.wait()
    server.shutdown()
    check_promises(summary)
    assert summary["steps"] == 6 and summary["groups_trained"] == 48
    assert summary["groups_dropped"] <= 2, "a busy machine may make the judge too slow for most of a group"
    kinds = summary["reward_failures"]["reward/moody"]
    assert kinds.keys() >= {"raised ValueError", "returned nan", "returned list, not a number", "timed out"}, kinds
    assert any(kind.startswith("crashed") for kind in kinds)
    graded = summary["reward_failures"]["reward/judge"]
    assert graded.keys() >= {"raised AskingError", "timed out"}, graded
    assert all(total <= 12 for total in kinds.values()), "nobody pays for another"
    page = (run.folder / "report.html").read_text()
    assert "moody" in page and "timed out" in page and "AskingError" in page
    rows = steps_of(run.folder)
    assert 0 < sum(row["reward_missing"] for row in rows) <= summary["rewards_failed"]


def test_a_run_whose_evaluations_get_no_better_ends_and_keeps_the_best(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        [
            *SHORT, "trainer.steps=60", "trainer.optimizer.lr=1e-12", "prompts.eval_every=2", "prompts.stop_after=3",
            "trainer.checkpoint={every: 2, keep: 1, keep_best: true}",
            f"trainer.checkpoint.then=cp -r {{folder}} {tmp_path}/copied-{{step}}",
        ],
    )  # fmt: skip
    summary = run.wait()
    check_promises(summary)
    rounds = [row for row in read_lines(run.folder / "metrics.jsonl") if row["kind"] == "eval"]
    assert len({row["reward"] for row in rounds}) == 1, "so small a rate changes no greedy answer"
    assert 4 <= summary["steps"] < 20 and summary["eval_best_step"] == 0
    assert checkpoint_folders.versions(run.folder / "checkpoints") == [2, summary["steps"]], (
        "of what was trained the first"
    )
    last = tmp_path / f"copied-{summary['steps']}"
    assert (last / "model.safetensors").exists(), "the run waits for it"
    assert (tmp_path / "copied-2" / "trainer").is_dir()
    (why,) = [words for words in summary["look_at_this"] if "prompts.stop_after" in words]
    assert f"after {summary['steps']} of 60 steps: 3 evaluations in a row were no better" in why


@pytest.mark.chaos
def test_a_reference_that_is_refreshed_takes_checkpoints_also_after_it_died(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        [
            *SHORT, "trainer.steps=24", "prompts.eval=null", "trainer.algorithm.kl.coefficient=0.01",
            "reference.refresh_every=8", "trainer.checkpoint={every: 2, keep: 1}", "trainer.optimizer.lr=1e-3",
        ],
    )  # fmt: skip
    run.wait_for_step(9)
    log, deadline = run.folder / "logs" / "reference-0.jsonl", time.monotonic() + 60
    while "the reference is refreshed" not in log.read_text():
        assert time.monotonic() < deadline, "groups are scored ahead, but not for so long"
        time.sleep(0.02)
    run.actors()["reference-0"].kill()  # whoever comes in its place finds version 8, which is not among the newest
    check_promises(run.wait())
    assert [row["version"] for row in read_lines(log) if row["event"] == "the reference is refreshed"] == [8, 8, 16]
    kl = [row["reference_kl"] for row in steps_of(run.folder)]
    assert max(kl[18:22]) < max(kl[5:8]), "it is near again"
    assert checkpoint_folders.versions(run.folder / "checkpoints") == [24]
    told = CliRunner().invoke(cli.app, ["trace", str(run.folder), "--out", str(tmp_path / "trace.json")])
    assert "ui.perfetto.dev" in told.output, told.output
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert {"trainer", "reference-0", "rollout-0", "reward-0"} <= set(names.values())
    assert sum(event["ph"] == "X" and event["name"].startswith("step ") for event in found) == 24
    assert all(event["ts"] >= 0 and event.get("dur", 0) >= 0 for event in found if event["ph"] != "M")
    assert "reference-0" in {names[event["pid"]] for event in found if event["name"] == "started again"}


@pytest.mark.chaos
def test_a_curriculum_leaves_out_what_is_too_easy(tmp_path: Path) -> None:
    rewards = "[{function: 'tests.e2e.rewards:parity'}]"  # the same for every answer to about half of the prompts
    run = Run(
        tmp_path,
        [
            *SHORT, "trainer.steps=12", "prompts.train={type: sort, size: 24}", "prompts.eval=null",
            f"reward.functions={rewards}", "replay.samples=all", "prompts.curriculum={rest_hard: 9, rest_easy: 9}",
        ],
    )  # fmt: skip
    check_promises(run.wait())
    groups: dict[int, dict[str, Any]] = {}
    for row in read_lines(run.folder / "samples.jsonl"):
        found = groups.setdefault(row["group"], {"prompt": row["prompt"], "rewards": []})
        found["rewards"].append(row["reward"])
    asked: dict[str, list[float]] = {}
    for number in sorted(groups):
        asked.setdefault(groups[number]["prompt"], []).append(float(np.mean(groups[number]["rewards"])))
    assert any(len(means) > 2 for means in asked.values()) and any(means[0] in (0, 1) for means in asked.values())
    for means in asked.values():  # groups that were leased before an answer was judged come once more at most
        assert sum(mean in (0, 1) for mean in means) <= 3
    assert steps_of(run.folder)[-1]["prompts_resting"] > 0


def test_a_mixture_of_sources_has_a_curve_for_each(tmp_path: Path) -> None:
    parts = "{short: {type: sort, max_letters: 4}, long: {type: sort, min_letters: 6}}"
    run = Run(
        tmp_path,
        [
            *SHORT, "prompts.eval=null",
            f"prompts.train={{type: mix, sources: {parts}, weights: {{short: 3, long: 1}}}}",
            "reward.functions=[{function: 'tests.e2e.rewards:by_source', name: brief, sources: [short]}, "
            "{function: 'tests.e2e.rewards:by_source', name: slow, sources: [long]}, {function: length, weight: 0}]",
            "replay.samples=all",
        ],
    )  # fmt: skip
    check_promises(run.wait())
    for row in steps_of(run.folder):
        assert row["source/short"] > row.get("source/long", 0.1) > 0
    rows = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    short = [row["source"] == "short" for row in rows]
    assert 0.6 < sum(short) / len(short) < 0.9
    assert all(len(row["truth"]) == 4 for row in rows if row["source"] == "short")
    for row in rows:  # each is judged by its own function alone, and what is asked of all is there
        asked, other = ("brief", "slow") if row["source"] == "short" else ("slow", "brief")
        assert row["reward"] == row[f"reward/{asked}"] and f"reward/{other}" not in row and row["reward/length"] > 0
    assert all(row["reward/brief"] == pytest.approx(row["source/short"]) for row in steps_of(run.folder))


def test_a_reward_that_always_fails_ends_the_run_and_says_why(tmp_path: Path) -> None:
    run = Run(tmp_path, [*SHORT, "reward.functions=[{function: 'tests.e2e.rewards:breaks'}]"])
    assert run.process.wait(120) == 1
    output = run.output.read_text()
    assert "groups were dropped in a row" in output and "raised KeyError" in output
    assert not run.actors()


def test_what_cannot_work_fails_soon_and_clearly(tmp_path: Path) -> None:
    """Other mistakes: tests/preflight/test_mistakes.py."""
    run = Run(tmp_path, [*SHORT, "store.url=redis://127.0.0.1:1", "store.retry_s=1"])
    assert run.process.wait(120) in (1, 2)
    assert "no Redis answers at redis://127.0.0.1:1" in run.output.read_text()
    assert not run.actors()


def test_a_busy_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = Run(tmp_path, [*SHORT, f"broker.bind=tcp://127.0.0.1:{taken.getsockname()[1]}"])
        assert run.process.wait(120) == 1
    assert "broker.bind: cannot bind" in run.output.read_text()


def test_ctrl_c_saves_a_checkpoint_and_leaves_nothing(tmp_path: Path) -> None:
    # Nobody reads what it says: as where Ctrl-C ends what it is piped into first.
    run = Run(tmp_path, [*SHORT, "trainer.steps=100000"], read=False)
    run.wait_for_step(3)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(60) == 130, run.output.read_text()
    assert not run.actors()
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["outcome"] == "interrupted" and summary["groups_lost"] == 0
    assert (run.folder / "checkpoints" / f"step-{summary['steps']:06d}").is_dir()


def test_actors_end_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    waits = f"programs={{waits: {{command: [sh, -c, 'sleep 3000 & echo $! > {tmp_path}/pid; wait']}}}}"
    run = Run(tmp_path, [*SHORT, "trainer.steps=100000", waits])
    run.wait_for_step(2)
    sleeper = psutil.Process(int((tmp_path / "pid").read_text()))
    run.process.kill()
    run.process.wait()
    deadline = time.monotonic() + 40
    while (run.actors() or sleeper.is_running()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not run.actors() and not sleeper.is_running(), "what a program has started ends too"


def penstock(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return warm.run(*arguments, env=environment)


def serve_each(tmp_path: Path, redis_url: str, port: int, overrides: list[str]) -> dict[str, subprocess.Popen[bytes]]:
    """Every actor as a container starts it, for the run in ``tmp_path / "run"``."""
    folder = tmp_path / "run"
    prepared = penstock("prepare", str(QUICKSTART), *overrides, "--folder", str(folder))
    assert prepared.returncode == 0, prepared.stderr
    actors = {}
    for actor in ("broker", "trainer", "rollout", "reward", "reference"):
        arguments = ["serve", actor, "--config", str(folder / "config.yaml"), "--folder", str(folder), "--name", actor]
        if actor != "broker":
            arguments += ["--broker", f"tcp://127.0.0.1:{port}"]
        env = {**os.environ, "PENSTOCK_HEALTH_FILE": str(tmp_path / actor), "PENSTOCK_STORE": redis_url}
        command = [sys.executable, "-m", "penstock.pipeline.cli", *arguments]
        actors[actor] = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.DEVNULL)
    return actors


def test_actors_can_be_started_one_by_one(tmp_path: Path, redis_url: str) -> None:
    folder, port = tmp_path / "run", free_port()
    overrides = [*WHOLE, f"broker.bind=tcp://127.0.0.1:{port}", "store.shutdown=true", "trainer.steps=40"]
    actors = serve_each(tmp_path, redis_url, port, overrides)
    watching = [sys.executable, "-m", "penstock.pipeline.cli", "top", "--broker", f"tcp://127.0.0.1:{port}"]
    while not (folder / "metrics.jsonl").is_file():
        time.sleep(0.1)
    watcher = subprocess.Popen(watching, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not steps_of(folder):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    now = json.loads(penstock("status", str(folder), "--json").stdout)
    assert now["steps"] == 40 and {"rollout", "trainer", "reward", "reference"} <= now["members"].keys()
    for actor in actors:
        assert time.time() - (tmp_path / actor).stat().st_mtime < 5, f"the pulse of {actor}"
    assert {actor: process.wait(120) for actor, process in actors.items()} == dict.fromkeys(actors, 0)
    shown, _ = watcher.communicate(timeout=60)
    assert watcher.returncode == 0 and "/40  reward" in shown
    assert len(steps_of(folder)) == 40
    summary = json.loads((folder / "summary.json").read_text())
    check_promises(summary)
    assert len(page_of(folder / "report.html")["steps"]["step"]) == 40
    with pytest.raises(redis.ConnectionError):
        redis.Redis.from_url(redis_url).ping()  # the store has ended last

    again = penstock("prepare", str(QUICKSTART), *overrides, "--folder", str(folder))
    assert again.returncode == 2 and "is complete: 40 steps" in again.stderr
    late = penstock(
        "serve", "reward", "--config", str(folder / "config.yaml"), "--folder", str(folder), "--broker", "-"
    )
    assert late.returncode == 0 and "is complete: 40 steps" in late.stderr
    assert json.loads(penstock("status", str(folder), "--json").stdout) == summary
    longer = penstock("prepare", str(QUICKSTART), *overrides, "trainer.steps=42", "--folder", str(folder))
    assert longer.returncode == 0 and not (folder / "summary.json").is_file()
    other = penstock("prepare", str(QUICKSTART), *overrides, "run.seed=5", "--folder", str(folder))
    assert other.returncode == 2 and "run.seed: 5, but the run began with 0" in other.stderr


@pytest.mark.chaos
def test_a_stopped_trainer_of_two_ranks_leaves_a_checkpoint_and_the_broker_ends_the_run(
    tmp_path: Path, redis_url: str
) -> None:
    folder, port = tmp_path / "run", free_port()
    overrides = [*WHOLE, f"broker.bind=tcp://127.0.0.1:{port}", "trainer.steps=5000", "trainer.ranks=2"]
    actors = serve_each(tmp_path, redis_url, port, overrides)
    deadline = time.monotonic() + 90
    while len(steps_of(folder)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    trainer = actors.pop("trainer")
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait(60) == 0
    (checkpoint,) = (folder / "checkpoints").glob("step-*")
    assert int(checkpoint.name.removeprefix("step-")) >= 3
    actors["broker"].send_signal(signal.SIGTERM)
    assert {process.wait(60) for process in actors.values()} == {0}
    assert json.loads((folder / "summary.json").read_text())["outcome"] == "interrupted"


@pytest.mark.chaos
def test_a_failed_run_of_single_actors_ends_and_can_go_on(tmp_path: Path, redis_url: str) -> None:
    folder, port = tmp_path / "run", free_port()
    overrides = [*WHOLE, f"broker.bind=tcp://127.0.0.1:{port}", "broker.max_consecutive_drops=4"]
    broken = "reward.functions=[{function: 'tests.e2e.rewards:breaks'}]"
    actors = serve_each(tmp_path, redis_url, port, [*overrides, broken])
    codes = {actor: process.wait(120) for actor, process in actors.items()}
    assert codes.pop("broker") == 78 and set(codes.values()) == {0}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["outcome"] == "failed" and "no such column" in summary["error"]
    again = penstock("serve", "broker", "--config", str(folder / "config.yaml"), "--folder", str(folder))
    assert again.returncode == 0 and "has failed" in again.stderr and "no such column" in again.stderr
    actors = serve_each(tmp_path, redis_url, port, overrides)  # with a reward that works
    assert {process.wait(120) for process in actors.values()} == {0}
    check_promises(json.loads((folder / "summary.json").read_text()))


@pytest.mark.chaos
def test_a_trainer_that_would_only_die_again_ends_the_run_of_single_actors(tmp_path: Path, redis_url: str) -> None:
    port = free_port()
    loss = "trainer.algorithm.loss={type: custom, function: 'tests.e2e.mistakes:soon_raises'}"
    overrides = [*WHOLE, f"broker.bind=tcp://127.0.0.1:{port}", "trainer.steps=500", loss]
    actors = serve_each(tmp_path, redis_url, port, overrides)
    arguments = actors["trainer"].args
    assert actors.pop("trainer").wait(120) == 1
    again = subprocess.Popen(arguments, cwd=ROOT, env={**os.environ, "PENSTOCK_HEALTH_FILE": str(tmp_path / "trainer")})
    assert again.wait(120) == 78
    codes = {actor: process.wait(120) for actor, process in actors.items()}
    assert codes.pop("broker") == 78 and set(codes.values()) == {0}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["outcome"] == "failed" and "trainer.algorithm.loss.function" in summary["error"]
    assert "the same failure twice at step" in summary["error"]


def test_status_says_what_is_missing(tmp_path: Path) -> None:
    nothing = penstock("status")
    assert nothing.returncode == 2 and "--broker" in nothing.stderr
    stranger = penstock("status", str(tmp_path))
    assert stranger.returncode == 2 and "no broker has ever listened" in stranger.stderr
    (tmp_path / "broker.address").write_text("tcp://127.0.0.1:9\n")
    killed = penstock("status", str(tmp_path))
    assert killed.returncode == 2 and f"go on with: penstock run --resume {tmp_path}" in killed.stderr
    silent = penstock("status", "--broker", "tcp://127.0.0.1:9")
    assert silent.returncode == 2 and "no broker answers at tcp://127.0.0.1:9" in silent.stderr
