"""How runs end that did not go well: with the reason, its key, and what to do; and how they go on."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from penstock.pipeline.run.summary import steps_of
from tests.e2e.runs import ROOT, SHORT, Run, check_promises, free_port, page_of

LOSS = "trainer.algorithm.loss={{type: custom, function: 'tests.e2e.mistakes:{}'}}"
REWARD = "reward.functions=[{{function: 'tests.e2e.mistakes:{}', timeout_s: {}}}]"


def test_what_a_run_waits_for_at_its_start_is_said_without_a_terminal_too(tmp_path: Path) -> None:
    run = Run(tmp_path, ["gateway.http=127.0.0.1:0", "gateway.bind=tcp://127.0.0.1:0"], ROOT / "configs" / "agent.yaml")
    deadline = time.monotonic() + 60
    while "making the tiny model; its warm start is supervised" not in (said := run.output.read_text()):
        assert time.monotonic() < deadline, said
        time.sleep(0.1)
    assert f"it waits for agents, which you start beside it: penstock play {run.folder} my_env:MyClass" in said
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(30) == 130 and f"penstock run --resume {run.folder}" in run.output.read_text()


def test_who_is_ended_while_a_program_is_waited_for_leaves_nothing(tmp_path: Path) -> None:
    program = {"command": f"sleep 3{os.getpid()}", "ready": f"tcp://127.0.0.1:{free_port()}"}
    run = Run(tmp_path, [*SHORT, f"programs={json.dumps({'slow': program})}"])
    deadline = time.monotonic() + 60
    while not sleeping(program["command"]):
        assert time.monotonic() < deadline, run.output.read_text()
        time.sleep(0.1)
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(30) == 130 and "interrupted before the run began" in run.output.read_text()
    assert not sleeping(program["command"])
    assert sorted(path.name for path in run.folder.iterdir()) == ["logs", "run.lock"], "where another may begin"


def sleeping(command: str) -> bool:
    return any(process.info["cmdline"] == command.split() for process in psutil.process_iter(["cmdline"]))


def test_a_loss_that_becomes_nan_ends_the_run_by_its_name(tmp_path: Path) -> None:
    run = Run(tmp_path, [*SHORT, "trainer.steps=50", "trainer.max_consecutive_skipped=3", LOSS.format("soon_nan")])
    summary = run.wait(120, code=1)
    said = run.output.read_text()
    assert "3 steps in a row were skipped" in said and "tests.e2e.mistakes:soon_nan" in said
    assert "trainer.max_consecutive_skipped" in said and "Traceback" not in said
    assert summary["outcome"] == "failed" and summary["steps"] < 10 and summary["steps_skipped"] >= 2
    assert summary["restarts"] == 0 and f"penstock run --resume {run.folder}" in said
    broker = (run.folder / "logs" / "broker.stderr").read_text()
    assert "3 steps in a row were skipped" in broker, "it knows, and tells trackers"


def test_a_loss_that_raises_is_tried_twice_and_told_with_its_line(tmp_path: Path) -> None:
    run = Run(tmp_path, [*SHORT, "trainer.steps=50", LOSS.format("soon_raises")])
    summary = run.wait(120, code=1)
    said = run.output.read_text()
    line = next(
        number
        for number, text in enumerate((Path(__file__).parent / "mistakes.py").read_text().splitlines(), 1)
        if "the mistake" in text
    )
    assert "the same failure twice at step" in said
    assert "trainer.algorithm.loss.function: tests.e2e.mistakes:soon_raises raised IndexError: the mistake" in said
    assert f"mistakes.py, line {line}" in said and "Traceback" not in said
    # it died twice at step 2, and before that perhaps at 0 and 1, where those steps' commits were not known yet
    assert summary["outcome"] == "failed" and 1 <= summary["restarts"] <= 3


def test_a_run_that_ends_well_says_what_went_wrong_in_it(tmp_path: Path) -> None:
    rows = [{"prompt": f"sort {word}=", "truth": "".join(sorted(word))} for word in ("badc", "hgfe", "acdb", "feba")]
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "", "truth": ""}])
    )
    unusable = [{"prompt": "", "truth": ""}, {"prompt": "sort " + "a" * 300 + "=", "truth": ""}]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, *unusable]))
    source = "{{type: hub, path: json, files: [{}], truth_key: truth, chat: false}}"
    overrides = [
        f"prompts.train={source.format(tmp_path / 'train.jsonl')}",
        f"prompts.eval={{texts: {source.format(tmp_path / 'eval.jsonl')}}}",
        REWARD.format("mostly_fails", 5),
        LOSS.format("once_nan"),
    ]
    run = Run(tmp_path, [*SHORT, *overrides])
    summary = run.wait(180)
    check_promises(summary)
    said = run.output.read_text()
    assert summary["outcome"] == "complete" and summary["steps_skipped"] == 1 and summary["prompts_dropped"] > 0
    assert summary["rewards_failed"] >= 6 * 8 and summary["groups_without_variance"] == summary["groups_trained"]
    assert summary["eval_after"] is None and set(summary["evaluations"]["after"]) <= {"texts"}
    found = "\n".join(summary["look_at_this"])
    for words in (
        "1 of 6 steps were skipped",
        "trained groups had answers of equal reward",
        "calls failed",
        "raised LookupError",
        "prompts were dropped, since they cannot be used",
        "times an evaluation prompt had no reward",
    ):
        assert words in found and words in " ".join(said.split()), words
    assert page_of(run.folder / "report.html")["summary"]["look_at_this"] == summary["look_at_this"]
    assert sum(path.stat().st_size for path in (run.folder / "logs").iterdir()) < 2_000_000


@pytest.mark.chaos
def test_a_run_goes_on_from_its_folder_alone_with_what_it_was_given(tmp_path: Path) -> None:
    run = Run(tmp_path, [*SHORT, "trainer.steps=100000", "trainer.optimizer.lr=1.0e-4", "prompts.eval=null"])
    run.wait_for_step(3)
    run.process.send_signal(signal.SIGINT)
    stopped = run.wait(60, code=130)
    assert f"go on with: penstock run --resume {run.folder}" in " ".join(run.output.read_text().split())
    run.folder = run.folder.rename(tmp_path / "moved")
    again = Run.resumed(run, [f"trainer.steps={stopped['steps'] + 3}", "gate.max_lag=1"])
    summary = again.wait(120)
    check_promises(summary)
    assert summary["run"] == "run" and summary["groups_trained"] == 8 * summary["steps"], "all that it had is there"
    assert summary["steps"] == stopped["steps"] + 3 and summary["outcome"] == "complete"
    said = again.output.read_text()
    assert "changed: gate.max_lag: 2 → 1" in said and f"changed: trainer.steps: 100000 → {summary['steps']}" in said
    assert "lr" not in said.partition("changed")[2].partition("run folder")[0]
    rows = {row["step"]: row for row in steps_of(run.folder)}
    assert rows[0]["max_lag"] == 2 and rows[summary["steps"] - 1]["max_lag"] == 1
    assert {row["lr"] for row in rows.values()} == {1.0e-4}
    refused = Run.resumed(run, ["rollout.sampling.n=2"])
    assert refused.process.wait(60) == 2
    assert "rollout.sampling.n: 2, but the run began with 4" in refused.output.read_text()


@pytest.mark.parametrize(("signals", "seconds"), [pytest.param(1, 20, marks=pytest.mark.chaos), (2, 6)])
def test_ctrl_c_ends_a_run_whose_reward_hangs(tmp_path: Path, signals: int, seconds: float) -> None:
    run = Run(tmp_path, [*SHORT, REWARD.format("hangs", 3000), "prompts.eval=null", "model.warm_start.steps=0"])
    deadline = time.monotonic() + 150
    while "unscored=24" not in run.output.read_text():
        assert time.monotonic() < deadline and run.process.poll() is None, run.output.read_text()
        time.sleep(0.2)
    began = time.monotonic()
    for _ in range(signals):
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    assert run.process.wait(60) == 130, run.output.read_text()
    assert time.monotonic() - began < seconds
    assert not run.actors()
