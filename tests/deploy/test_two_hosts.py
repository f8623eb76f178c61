"""Two hosts, as network namespaces: a rollout joins from the second one, and the link between them is cut."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.services.runtime.lines import read_lines
from tests.deploy.stack import until
from tests.e2e.runs import ROOT, Run, check_promises

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2"
    ),
]
NETWORK = "10.99.41.0/24"
FIRST, SECOND = "penstock-1", "penstock-2"
CUT_S = 20.0


def ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[None]:
    for name in (FIRST, SECOND):
        ip("netns", "delete", name, check=False)
    ip("netns", "add", FIRST)
    ip("netns", "add", SECOND)
    ip("link", "add", "pen1", "netns", FIRST, "type", "veth", "peer", "name", "pen2", "netns", SECOND)
    for name, link, address in ((FIRST, "pen1", "10.99.41.1/24"), (SECOND, "pen2", "10.99.41.2/24")):
        ip("-n", name, "address", "add", address, "dev", link)
        ip("-n", name, "link", "set", link, "up")
        ip("-n", name, "link", "set", "lo", "up")
    yield
    for name in (FIRST, SECOND):
        ip("netns", "delete", name, check=False)


def on(host: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", host)


def loads(run: Run, receiver: str) -> list[dict[str, Any]]:
    return [row for row in read_lines(run.folder / "weights.jsonl") if row["receiver"] == receiver]


def test_a_rollout_on_another_host_joins_and_comes_back_after_the_link_was_cut(tmp_path: Path, hosts: None) -> None:
    transport = ["weights.transport=gloo", f"weights.host={NETWORK}"]
    run = Run(
        tmp_path,
        ["broker.bind=tcp://10.99.41.1:0", *transport, "rollout.count=1", "trainer.steps=250"],
        prefix=on(FIRST),
    )
    second = tmp_path / "second"  # what the second host has: the config, the model and the keys, by hand
    second.mkdir()
    until("the first step", lambda: bool(read_lines(run.folder / "metrics.jsonl")), 120)
    shutil.copytree(run.folder / "model", second / "model")
    shutil.copy(run.folder / "keys" / "client.json", second / "client.json")
    address = (run.folder / "broker.address").read_text().strip()
    assert address.startswith("tcp://10.99.41.1:")
    serve = ["serve", "rollout", "--config", str(run.folder / "config.yaml"), "--folder", str(second), "--name", "far"]
    serve += ["--broker", address, "--keys", str(second / "client.json")]
    with (tmp_path / "far.log").open("wb") as log:
        far = subprocess.Popen(
            [*on(SECOND), sys.executable, "-m", "penstock.pipeline.cli", *serve], cwd=ROOT, stderr=log
        )
    until("a version over gloo", lambda: any(r["transport"] == "gloo" for r in loads(run, "far")), 60)
    finished = second / "logs" / "far.finished.jsonl"
    until("groups from the second host", lambda: len(read_lines(finished)) > 20, 60)

    cut = time.time()
    ip("-n", FIRST, "link", "set", "pen1", "down")
    time.sleep(CUT_S)
    ip("-n", FIRST, "link", "set", "pen1", "up")
    restored = time.time()
    until(
        "a version over gloo after the cut",
        lambda: any(r["time"] > restored and r["transport"] == "gloo" for r in loads(run, "far")),
        60,
    )
    back = min(r["time"] for r in loads(run, "far") if r["time"] > restored)
    print(f"cut for {restored - cut:.1f} s; the far rollout has a version {back - restored:.1f} s after")
    until("groups after the cut", lambda: any(r["time"] > restored for r in read_lines(finished)), 60)

    summary = run.wait(300)
    check_promises(summary)
    assert summary["steps"] == 250 and summary["reward_last"] >= 0.90
    assert far.wait(60) == 0, (tmp_path / "far.log").read_text()[-2000:]
    assert not psutil.pid_exists(far.pid)
    trained = {g for row in read_lines(run.folder / "ledger.jsonl") for g in row["groups"]}
    lost = {row["group"] for row in read_lines(finished)} - trained
    assert not lost, f"finished on the second host, and not trained on: {lost}"
    steps = [row["time"] for row in read_lines(run.folder / "metrics.jsonl") if row["kind"] == "step"]
    waits = [b - a for a, b in pairwise(steps)]
    print(f"longest time between two steps: {max(waits):.1f} s")
    print(json.dumps(summary))
