"""Running the real command, and reading what it left."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import psutil

from penstock.pipeline.run.command import penstock
from tests import warm

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"

SHORT = [
    "trainer.steps=6",
    "gate.groups_per_step=8",
    "prompts.eval_size=16",
    "model.warm_start.steps=2",
    "model.warm_start.batch=16",
    "rollout.sampling.n=4",
    "rollout.count=1",
    "trainer.algorithm.kl.coefficient=0",
]
"""Overrides that make the quickstart a matter of seconds: what starts takes longer than what it does, so there are one
rollout and no reference."""
WHOLE = [*SHORT, "rollout.count=2", "trainer.algorithm.kl.coefficient=0.001"]
"""With two rollouts and a reference, as the quickstart has."""

STARTED: list[warm.Process] = []
"""Of the test that is running: none may outlive it, also where it fails (tests/conftest.py)."""


def unread() -> BinaryIO:
    """A pipe that nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "wb")


def free_port() -> int:
    """Of this machine, that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Run:
    """``penstock run`` in the background; ``prefix`` stands before the command, such as ``ip netns exec HOST``, and
    ``env`` has variables of its own; ``read``: what it says is, else it goes into a pipe whose reader has left;
    ``fresh``: as users start it, and not as a fork (`tests/warm.py`)."""

    def __init__(
        self, folder: Path, overrides: list[str], config: Path = QUICKSTART, prefix: tuple[str, ...] = (),
        env: Mapping[str, str] = MappingProxyType({}), read: bool = True,
        fresh: bool = False,
    ) -> None:  # fmt: skip
        self.folder = folder / "run"
        self.output = folder / "output"
        self.output.touch()
        arguments = ["run", str(config), f"run.folder={folder}", "run.name=run", *overrides]
        with self.output.open("wb") if read else unread() as out:
            if prefix or fresh:
                command = [*prefix, *penstock(*arguments)]
                self.process = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, env={**os.environ, **env})
            else:
                self.process = warm.start(*arguments, output=out, env=env)
        STARTED.append(self.process)

    @classmethod
    def resumed(cls, run: Run, overrides: list[str]) -> Run:
        """``penstock run --resume`` on the folder of ``run``."""
        again = cls.__new__(cls)
        again.folder, again.output = run.folder, run.output.with_name("output-again")
        with again.output.open("wb") as out:
            again.process = warm.start("run", "--resume", str(run.folder), *overrides, output=out)
        STARTED.append(again.process)
        return again

    def wait(self, seconds: float = 480, code: int = 0) -> dict[str, Any]:
        """Waits for the end; asserts its exit code and that no process is left; returns the summary."""
        assert self.process.wait(seconds) == code, self.output.read_text()[-3000:]
        assert not self.actors(), "processes were left behind"
        return json.loads((self.folder / "summary.json").read_text())

    def actors(self) -> dict[str, psutil.Process]:
        """The run's live processes by actor name."""
        found = {}
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if "serve" in line and str(self.folder) in line:
                found[line[line.index("--name") + 1]] = process
            elif line and "redis-server" in line[0] and str(self.folder) in " ".join(line):
                found["redis"] = process
        return found

    def wait_for_step(self, step: int, seconds: float = 240) -> None:
        """Until metrics.jsonl has ``step``."""
        deadline = time.monotonic() + seconds
        metrics = self.folder / "metrics.jsonl"
        while time.monotonic() < deadline:
            if metrics.is_file() and any(f'"step": {step},' in line for line in metrics.read_text().splitlines()):
                return
            assert self.process.poll() is None, self.output.read_text()[-3000:]
            time.sleep(0.05)
        raise AssertionError(f"step {step} did not come: {self.output.read_text()[-2000:]}")


def check_promises(summary: dict[str, Any], outcome: str = "complete") -> None:
    """What every run must be able to say at its end."""
    assert summary["outcome"] == outcome
    assert summary["groups_lost"] == 0 and summary["groups_trained_twice"] == 0
    assert summary["lag_max_seen"] <= summary["max_lag"]


def page_of(page: Path) -> dict[str, Any]:
    """What a page in one file has of its first run."""
    data = page.read_text().split('<script type="application/json" id="data">')[1].split("</script>")[0]
    return json.loads(data)["runs"][0]
