"""A run on a real Ray cluster of several nodes: one dies under a rollout, and Ctrl-C has it save what it has."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.services.runtime.lines import read_lines
from tests.deploy.stack import until
from tests.e2e.runs import QUICKSTART, ROOT, check_promises

utils = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: make ray-test")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

CPUS = 4
LAUNCH = [sys.executable, "-m", "penstock.pipeline.cli", "launch", "ray"]


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A node for Ray's own services, which has no room for us, and four others."""
    made = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for number in range(4):
        made.add_node(num_cpus=CPUS, resources={f"n{number}": 1})
    made.wait_for_nodes()
    yield made
    made.shutdown()


def launch(cluster: Any, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        command = [*LAUNCH, *arguments, "--address", cluster.address, "--no-gpus"]
        return subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)


def steps(folder: Path) -> int:
    return len({row["step"] for row in read_lines(folder / "ledger.jsonl")})


def processes(folder: Path, *words: str) -> list[psutil.Process]:
    """Those of the run with all of ``words`` in their command line."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if str(folder) in line and set(words) <= set(line):
            found.append(process)
    return found


def joined_as(folder: Path, name: str) -> list[psutil.Process]:
    """`penstock join` of this name."""
    return [p for p in processes(folder, "join") if (line := p.cmdline())[line.index("--name") + 1] == name]


def test_a_node_dies_and_the_run_is_stopped_and_goes_on(tmp_path: Path, cluster: Any) -> None:
    folder, log = tmp_path / "runs" / "run", tmp_path / "launch.log"
    overrides = [f"run.folder={folder.parent}", "run.name=run", "rollout.count=2", "trainer.steps=120"]
    # So many threads that a node has room for one of them.
    run = launch(cluster, log, str(QUICKSTART), *overrides, "rollout.threads=3", "--network", "127.0.0.0/8")
    until("both rollouts train", lambda: steps(folder) >= 15 or run.poll() is not None, 400)
    assert run.poll() is None, log.read_text()[-3000:]

    (joined,) = joined_as(folder, "1")
    raylet = next(parent for parent in joined.parents() if parent.name() == "raylet")
    for process in [*joined.children(recursive=True), joined]:
        process.kill()
    node = next(n for n in cluster.list_all_nodes() if raylet.pid == _raylet(n))
    cluster.remove_node(node, allow_graceful=False)
    until("the rollout is on another node", lambda: bool(joined_as(folder, "1")), 120)
    behind = steps(folder)
    until("the run goes on", lambda: steps(folder) > behind + 5, 240)

    run.send_signal(signal.SIGINT)
    assert run.wait(240) == 130, log.read_text()[-3000:]
    assert json.loads((folder / "summary.json").read_text())["outcome"] == "interrupted"
    until("nobody is left", lambda: not processes(folder), 60)

    again = launch(cluster, tmp_path / "again.log", "--resume", str(folder))
    assert again.wait(600) == 0, (tmp_path / "again.log").read_text()[-3000:]
    summary = json.loads((folder / "summary.json").read_text())
    check_promises(summary)
    assert summary["steps"] == 120
    until("nobody is left", lambda: not processes(folder), 60)


def test_no_cluster_is_told(tmp_path: Path) -> None:
    command = [*LAUNCH, str(QUICKSTART), f"run.folder={tmp_path}", "--network", "127.0.0.0/8", "--no-gpus"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "--address: no Ray cluster answers" in done.stderr


def _raylet(node: Any) -> int:
    (info,) = node.all_processes["raylet"]
    return int(info.process.pid)
