"""A stack of docker-compose.yml, driven by the command that users type."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROJECT = "penstock-test"
SUBNET = "10.89.78.0/24"


class Stack:
    """The profile cpu under a project name of its own."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.files = ["docker-compose.yml", *(["tests/deploy/build.yaml"] if os.environ.get("PENSTOCK_WHEELS") else [])]
        self.env = {
            **os.environ,
            "PENSTOCK_PORT": str(port),
            "PENSTOCK_WEIGHTS_SUBNET": SUBNET,
            "PENSTOCK_RUN": "test",
        }
        self._started = time.monotonic()

    def compose(self, *arguments: str, seconds: float = 600) -> str:
        """Output of ``docker compose ARGUMENTS``; fails where that fails."""
        command = ["docker", "compose", "-p", PROJECT, "--profile", "cpu"]
        for file in self.files:
            command += ["-f", file]
        done = subprocess.run(
            [*command, *arguments], cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=seconds
        )
        assert done.returncode == 0, f"docker compose {' '.join(arguments)}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def containers(self, service: str = "") -> list[dict[str, Any]]:
        """What docker knows of the project's containers, running or not; of one service."""
        labels = [f"--filter=label=com.docker.compose.project={PROJECT}"]
        if service:
            labels.append(f"--filter=label=com.docker.compose.service={service}")
        names = docker("ps", "-aq", *labels).split()
        return json.loads(docker("inspect", *names)) if names else []

    def crash(self, service: str) -> None:
        """SIGKILL to the first process of one of the service's containers: its restart policy has to help."""
        (victim, *_) = [c for c in self.containers(service) if c["State"]["Running"]]
        restarts = victim["RestartCount"]
        self.note(f"killing {service} at step {self.step()}")
        os.kill(victim["State"]["Pid"], signal.SIGKILL)

        def back() -> bool:
            (now,) = json.loads(docker("inspect", victim["Id"]))
            return now["RestartCount"] > restarts and now["State"]["Running"]

        until(f"{service} is started again", back, 60)

    def read(self, path: str) -> str:
        """A file of the run's folder; empty where there is none."""
        volume = f"{PROJECT}_runs:/runs:ro"
        command = ["docker", "run", "--rm", "--network", "none", "-v", volume, "--entrypoint", "cat", "penstock:light"]
        return subprocess.run([*command, f"/runs/test/{path}"], capture_output=True, text=True).stdout

    def step(self) -> int:
        """Steps that are committed; -1 while nobody can tell."""
        return self.status().get("step", -1)

    def status(self) -> dict[str, Any]:
        """What `penstock status` says in the broker's container; empty while the broker is away."""
        found = [c["Name"].lstrip("/") for c in self.containers("broker") if c["State"]["Running"]]
        if not found:
            return {}
        command = ["docker", "exec", found[0], "penstock", "status", "runs/test", "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
        return json.loads(done.stdout) if done.returncode == 0 else {}

    def wait_for_step(self, step: int) -> None:
        """Until so many steps are committed."""
        until(f"step {step}", lambda: self.step() >= step, 300, every=1.0)

    def note(self, text: str) -> None:
        """Prints a line with the time since the stack was made."""
        print(f"{time.monotonic() - self._started:6.1f} s  {text}", flush=True)


def docker(*arguments: str) -> str:
    """Output of ``docker ARGUMENTS``."""
    return subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True, timeout=120).stdout


def until(what: str, condition: Callable[[], bool], seconds: float, every: float = 0.2) -> None:
    """Waits for ``condition``; fails naming it."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} s"
        time.sleep(every)
