"""What benchmarks refuse before anything runs, and what they make of short runs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.pipeline.bench import lag, soak
from penstock.pipeline.cli import app
from penstock.pipeline.config import ConfigError, dump, load
from penstock.pipeline.run.redis_server import PrivateRedis
from tests.e2e.runs import ROOT

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
RATE = 0.001


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["scoring", "--parts", "run"], "--parts: 'run' is not one of: runs, trl, calls"),
        (["scoring", "--lags", "0,x/2"], "--lags: '0,x,2' is not whole numbers"),
        (["weights", "--parts", "transfers"], "--parts: 'transfers' is not one of: transfer, pause, elastic, sparse"),
        (["weights", "--transports", "nccl"], "--transports: 'nccl' is not one of: shm, gloo"),
        (["weights", "--sizes", "11"], "--sizes: '11' is not one of: 10, 50"),
        (["gateway", "--config", str(ROOT / "configs" / "agent.yaml"), "--parts", "x"], "--parts: 'x' is not one of"),
        (["gateway", "--config", str(QUICKSTART)], "a tiny model and a gateway: use configs/agent.yaml"),
        (["peers", "--config", str(ROOT / "configs" / "gsm8k.yaml")], "bench peers compares on the sort task"),
        (["broker", "--rollouts", "0,4"], "--rollouts: '0,4' has 0, and each must be at least 1"),
        (["lag", "--lags", "a"], "--lags: 'a' is not whole numbers"),
        (["lag", "--corrections", "a"], "--corrections: 'a' is not one of: none, token-tis"),
        (["memory"], "there is no configs/grpo-*.yaml here"),
    ],
)
def test_what_it_cannot_take_is_named(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if arguments[0] in ("scoring", "lag"):
        arguments = [*arguments, "--config", str(QUICKSTART)]
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert isinstance(done.exception, ConfigError) and says in str(done.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "call",
    ["bench generate --requests 0", "bench generate --repeats 0", "bench broker --groups 0",
     f"doctor engine {QUICKSTART} --prompts 0", f"doctor engine {QUICKSTART} --prompts -1"],
)  # fmt: skip
def test_nothing_cannot_be_measured(call: str) -> None:
    done = CliRunner().invoke(app, call.split())
    assert done.exit_code == 2 and f"Invalid value for '{call.split()[-2]}'" in done.output, done.output


def done_run(folder: Path, overrides: list[str], steps: int, outcome: str = "complete") -> None:
    """A run that is over, as `penstock run` leaves it."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump(load(QUICKSTART, overrides)))
    (folder / "summary.json").write_text(json.dumps({"outcome": outcome}))
    rows = [{"kind": "step", "step": i, "reward": i / 100, "lag_mean": 1.0, "train_s": 1.0 * i} for i in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_lag_keeps_the_runs_that_are_asked_for_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bench(steps: int = 8, rate: float = RATE) -> None:
        lag.bench(Console(width=140), QUICKSTART, tmp_path, [4], ["none"], 1, steps, rate)

    (tmp_path / "model-run" / "model").mkdir(parents=True)
    (tmp_path / "model-run" / "config.yaml").write_text(dump(load(QUICKSTART)))
    run = tmp_path / "none-lag4-seed0"
    choices = [*lag.CORRECTIONS["none"], "gate.max_lag=4"]
    overrides = lag._overrides(run, tmp_path / "model-run" / "model", choices, 0, 8, RATE)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done_run(run, overrides, 8))
    bench()  # shorter than twice the lag
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it is there"))
    bench()
    for other, key in (({"steps": 9}, "trainer.steps: 8 → 9"), ({"rate": 0.5}, "trainer.optimizer.lr: 0.001 → 0.5")):
        with pytest.raises(ConfigError, match=f"--folder: .*{key}"):
            bench(**other)  # type: ignore[arg-type]
    for summary in ({"outcome": "interrupted"}, None):
        (run / "summary.json").unlink() if summary is None else (run / "summary.json").write_text(json.dumps(summary))
        with pytest.raises(ConfigError, match="--folder: .* did not come to its end"):
            bench()


def test_the_redis_of_a_run_in_a_deep_folder_is_found(tmp_path: Path) -> None:
    run = tmp_path / ("x" * 90) / "run"
    run.mkdir(parents=True)
    server = PrivateRedis(run, "always")
    with subprocess.Popen(server.command, stdout=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 20
            while not (found := soak._memory(run)):
                assert time.monotonic() < deadline
                time.sleep(0.1)
        finally:
            process.kill()
    server.remove()
    assert 0 < found["redis"] < 100


def test_a_soak_that_dies_leaves_no_run_going(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "penstock", lambda *_: [sys.executable, "-c", "import time; time.sleep(300)"])
    begun: list[psutil.Process] = []

    def dies(process: Any, *_: object) -> None:
        begun.append(psutil.Process(process.pid))
        raise KeyError

    monkeypatch.setattr(soak, "_watch", dies)
    with pytest.raises(KeyError):
        soak.bench(Console(), QUICKSTART, tmp_path / "soak", 10, 1)
    assert not begun[0].is_running()


def test_a_soak_tells_growth_only_where_it_has_looked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fewer than two looks"):
        soak._print(Console(), [], 40)
    samples = [(50, {"broker": 10.0, "gone": 1.0}), *((step, {"broker": 10.0}) for step in (300, 600, 1000))]
    console = Console(record=True)
    assert soak._print(console, samples, 1000)
    told = console.export_text()
    assert "broker" in told and "gone" not in told
