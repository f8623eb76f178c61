"""What a run serves for Prometheus, with that itself where it is installed (alerts, the board); and its traces."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.services.broker.prometheus import Exporter
from penstock.services.runtime.address import reached_at
from penstock.services.runtime.lines import read_lines
from tests.e2e.collector import Collector
from tests.e2e.runs import ROOT, SHORT, WHOLE, Run

FILES = ROOT / "docs" / "prometheus"
prometheus = pytest.mark.skipif(not shutil.which("prometheus"), reason="Prometheus is not installed")


def until(found: Callable[[], Any], seconds: float, what: str) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if answer := found():
                return answer
        except OSError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"waited {seconds:g} s for {what}")


def target_of(run: Run) -> str:
    path = run.folder.parent / "prometheus-run.json"
    until(path.exists, 180, "the file that says where metrics are")
    (row,) = json.loads(path.read_text())
    assert row["labels"] == {"run": "run"}
    return str(row["targets"][0])


def scrape(target: str) -> dict[str, list[Any]]:
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {family.name: family.samples for family in families}


@pytest.mark.slow
def test_a_run_serves_what_the_broker_knows_and_sends_the_life_of_each_group(tmp_path: Path) -> None:
    collector = Collector()
    more = ["run.prometheus=127.0.0.1:0", f"run.traces={collector.url}", "trainer.steps=14"]
    run = Run(tmp_path, [*WHOLE, *more])
    target = target_of(run)

    def after_a_step() -> dict[str, list[Any]] | None:
        found = scrape(target)
        return found if found.get("penstock_step") and found["penstock_step"][0].value >= 2 else None

    found = until(after_a_step, 120, "two steps")
    metrics = {s.labels["metric"]: s.value for s in found["penstock_step_metric"]}
    assert 0 <= metrics["reward"] <= 1 and metrics["lag_max"] <= found["penstock_max_lag"][0].value
    there = {s.labels["kind"]: s.value for s in found["penstock_actors"]}
    wanted = {s.labels["kind"]: s.value for s in found["penstock_actors_wanted"]}
    assert there["trainer"] == 1 and there["rollout"] == wanted["rollout"] == 2
    assert not [kind for kind, count in wanted.items() if there[kind] < count], "no alert without a cause"
    assert {s.labels["actor"] for s in found["penstock_actor_silent_seconds"]} >= {"trainer", "rollout-0"}
    assert {"busy"} <= {s.labels["gauge"] for s in found["penstock_actor"]}
    run.wait()
    assert not (tmp_path / "prometheus-run.json").exists(), "nobody looks for a run that is over"
    collector.close()
    check_lives(collector, run.folder)


def check_lives(collector: Collector, folder: Path) -> None:
    """Every group of every step has a trace, in which one thing follows the other."""
    lives = collector.lives()
    trained = {number for row in read_lines(folder / "ledger.jsonl") for number in row["groups"]}
    assert trained <= lives.keys() and collector.resources[0]["penstock.run"] == "run"
    for number in trained:
        root, *spans = lives[number]
        names = [span.name for span in spans]
        assert names[0] == "generate" and names[-2:] == ["wait for a step", "step"], names
        assert {"column reward/exact_match", "column reference"} <= set(names)
        assert {span.trace_id for span in spans} == {root.trace_id}
        assert root.start_time_unix_nano <= spans[0].start_time_unix_nano
        assert spans[-1].end_time_unix_nano <= root.end_time_unix_nano


def test_an_address_that_is_taken_is_an_error_of_its_key(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = Run(tmp_path, [*SHORT, f"run.prometheus=127.0.0.1:{taken.getsockname()[1]}"])
        assert run.process.wait(120) in (1, 2)
    assert "run.prometheus: cannot listen at" in run.output.read_text()


@pytest.mark.parametrize(("advertised", "host"), [("tcp://10.1.0.7:5555", "10.1.0.7"), (None, reached_at("0.0.0.0"))])
def test_a_prometheus_elsewhere_is_told_an_address_of_this_machine(
    advertised: str | None, host: str, tmp_path: Path
) -> None:
    exporter = Exporter("0.0.0.0:0", tmp_path / "run", "run", {}, advertised)
    (row,) = json.loads((tmp_path / "prometheus-run.json").read_text())
    assert row["targets"] == [f"{host}:{exporter.port}"]
    if not advertised:
        assert scrape(row["targets"][0]) == {}, "it answers there, and has been shown nothing yet"
    exporter.close()


def test_the_board_asks_for_metrics_that_there_are() -> None:
    board = json.loads((FILES / "grafana.json").read_text())
    asked = {name for panel in board["panels"] for target in panel["targets"]
             for name in re.findall(r"penstock_\w+", target["expr"])}  # fmt: skip
    documented = set(re.findall(r"penstock_\w+", (ROOT / "docs" / "prometheus.md").read_text()))
    assert asked <= documented
    alerts = set(re.findall(r"penstock_\w+", (FILES / "alerts.yml").read_text()))
    assert alerts <= documented


@prometheus
@pytest.mark.slow
def test_prometheus_finds_the_run_answers_the_board_and_tells_of_a_rollout_that_hangs(tmp_path: Path) -> None:
    for name in ("prometheus.yml", "alerts.yml"):
        subprocess.run(
            ["promtool", "check", "config" if name == "prometheus.yml" else "rules", str(FILES / name)], check=True
        )
    text = (FILES / "prometheus.yml").read_text().replace("../../runs/", f"{tmp_path}/").replace("5s", "1s")
    (tmp_path / "prometheus.yml").write_text(text + "  \n")
    (tmp_path / "alerts.yml").write_text((FILES / "alerts.yml").read_text().replace("> 15", "> 3"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    server = subprocess.Popen(
        ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb",
         f"--web.listen-address={address}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    run = Run(tmp_path, [*WHOLE, "run.prometheus=127.0.0.1:0", "trainer.steps=100000", "run.log_level=debug"])

    def ask(path: str, **query: str) -> Any:
        url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    try:
        until(lambda: ask("query", query="penstock_step > 3")["result"], 120, "Prometheus to see steps")
        both = 'penstock_actors{kind="rollout"} == 2'
        until(lambda: ask("query", query=both)["result"], 60, "both rollouts")
        board = json.loads((FILES / "grafana.json").read_text())
        asked = [target["expr"].replace("$run", "run") for panel in board["panels"] for target in panel["targets"]]
        # Nothing fails here, and the run is not over.
        asked = [query for query in asked if "reward_calls" not in query and "eval" not in query]

        def unanswered() -> list[str]:
            return [query for query in asked if not ask("query", query=query)["result"]]

        until(lambda: not unanswered(), 180, "an answer to every query of the board")
        pid = run.actors()["rollout-1"].pid
        os.kill(pid, signal.SIGSTOP)

        def firing() -> list[str]:
            return [a["labels"]["actor"] for a in ask("alerts")["alerts"]
                    if a["labels"]["alertname"] == "PenstockActorSilent" and a["state"] == "firing"]  # fmt: skip

        assert until(firing, 60, "the alert") == ["rollout-1"]
        os.kill(pid, signal.SIGCONT)
    finally:
        run.process.terminate()
        run.process.wait(60)
        server.kill()
