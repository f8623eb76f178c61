"""The whole pipeline in containers: scaled and killed while it runs, and closed to strangers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.deploy.stack import PROJECT, ROOT, Stack, docker, until
from tests.e2e.runs import WHOLE, check_promises

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.geteuid() != 0, reason="kills containers' processes from outside: needs root"),
]
STEPS = 300
"""Twice the quickstart's, so that there is time for everything while it runs."""
SERVICES = ("rollout", "reward", "broker", "redis", "trainer")


@pytest.fixture
def stack() -> Iterator[Stack]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = Stack(port)
    made.compose("down", "-v", "--remove-orphans")
    try:
        yield made
    finally:
        if os.environ.get("PENSTOCK_KEEP") is None:
            made.compose("down", "-v", "--remove-orphans")


def listening() -> set[tuple[str, int]]:
    """Ports of this host that wait for connections, in its own network namespace."""
    found = set()
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            found.add((connection.laddr.ip, connection.laddr.port))
    return found


def check_strangers(stack: Stack) -> None:
    """What a container of the control network can do without keys: nothing."""
    control = f"{PROJECT}_control"
    running = [c for c in stack.containers() if c["State"]["Running"]]  # prepare has ended
    hosts = [c["Name"].lstrip("/") for c in running if control in c["NetworkSettings"]["Networks"]]
    assert len(hosts) >= 5
    command = ["docker", "run", "--rm", "--network", control, "--entrypoint", "python"]
    command += ["-v", f"{ROOT / 'tests' / 'deploy' / 'probe.py'}:/probe.py:ro", "penstock:light", "/probe.py", *hosts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, bool]] = json.loads(done.stdout)
    stack.note(f"open to the control network: {found}")
    for host, ports in found.items():
        assert not any(ports.values()), f"{host} answers strangers: {ports}"
        assert list(ports) == (["5555"] if "broker" in host else []), f"{host} listens on {list(ports)}"


def check_networks(stack: Stack) -> None:
    """Who is on which network."""
    members: dict[str, set[str]] = {}
    for container in stack.containers():
        for network in container["NetworkSettings"]["Networks"]:
            members.setdefault(network, set()).add(container["Config"]["Labels"]["com.docker.compose.service"])
    assert members[f"{PROJECT}_weights"] == {"trainer", "rollout"}
    assert members["none"] == {"redis"}
    (network,) = json.loads(docker("network", "inspect", f"{PROJECT}_weights"))
    assert network["Internal"]


def check_hardening(stack: Stack) -> None:
    for container in stack.containers():
        host, service = container["HostConfig"], container["Config"]["Labels"]["com.docker.compose.service"]
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"], service
        assert host["LogConfig"]["Config"]["max-size"] == "10m" and host["Memory"], service
        assert service == "redis" or container["Config"]["User"] == "penstock", service


def test_a_run_in_containers_is_scaled_and_killed_and_loses_nothing(stack: Stack) -> None:
    before = listening()
    stack.compose("build", seconds=1500)
    stack.note("built")
    for line in docker("images", "--format", "{{.Repository}}:{{.Tag}} {{.Size}}").splitlines():
        if line.startswith(("penstock:", "python:3.11")):
            stack.note(f"image {line}")
    stack.env["PENSTOCK_OVERRIDES"] = f"trainer.steps={STEPS}"
    stack.compose("up", "-d", "--wait")
    stack.note("up: every container is healthy")
    opened = {address for address in listening() - before if address[0] not in ("::1",)}
    assert opened == {("127.0.0.1", stack.port)}, opened
    check_networks(stack)
    check_hardening(stack)
    check_strangers(stack)
    stack.note("strangers are refused")

    stack.wait_for_step(5)
    stack.compose("up", "-d", "--no-recreate", "--scale", "rollout=3")
    until("three rollouts that serve", lambda: serving(stack) == 3, 120, every=1.0)
    stack.note(f"rollout 1 to 3, all serving, at step {stack.step()}")
    for service in SERVICES:
        stack.crash(service)
        stack.wait_for_step(stack.step() + 2)
    stack.compose("up", "-d", "--no-recreate", "--scale", "rollout=1")
    stack.note(f"rollout 3 to 1, at step {stack.step()}")
    assert len([c for c in stack.containers("rollout") if c["State"]["Running"]]) == 1

    until("the end of every container", lambda: not running(stack), 900, every=1.0)
    stack.note("every container has ended")
    codes = {c["Name"]: c["State"]["ExitCode"] for c in stack.containers()}
    assert set(codes.values()) == {0}, codes
    summary = json.loads(stack.read("summary.json"))
    stack.note(json.dumps(summary))
    check_promises(summary)
    assert summary["steps"] == STEPS and summary["reward_last"] >= 0.90
    assert summary["restarts"] >= 4  # broker, and actors by name; Redis is no actor
    assert "<html" in stack.read("report.html")
    left = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if "runs/test" in (p.info["cmdline"] or [])]
    assert not left, f"left behind: {left}"

    with pytest.raises(AssertionError, match=r"service \"prepare\" didn't complete successfully: exit 2"):
        stack.compose("up", "-d")
    (prepare,) = stack.containers("prepare")
    said = subprocess.run(["docker", "logs", prepare["Id"]], capture_output=True, text=True).stderr
    assert f"the run in runs/test is complete: {STEPS} steps" in said
    assert not running(stack)
    stack.note("up again: said that the run is complete")


def running(stack: Stack) -> list[str]:
    return [c["Name"] for c in stack.containers() if c["State"]["Status"] in ("running", "restarting", "created")]


def serving(stack: Stack) -> int:
    members = stack.status().get("members", {}).values()
    return sum(m["kind"] == "rollout" and m["version"] >= 0 for m in members)


def test_a_stack_that_was_stopped_goes_on(stack: Stack) -> None:
    stack.compose("build", seconds=1500)
    stack.env["PENSTOCK_OVERRIDES"] = " ".join([*WHOLE, "trainer.steps=300"])
    stack.compose("up", "-d", "--wait")
    stack.wait_for_step(8)
    started = time.monotonic()
    stack.compose("stop")
    stack.note(f"stopped in {time.monotonic() - started:.1f} s")
    codes = {c["Name"]: c["State"]["ExitCode"] for c in stack.containers()}
    assert set(codes.values()) == {0}, codes
    assert json.loads(stack.read("summary.json"))["outcome"] == "interrupted"
    stack.compose("up", "-d")
    until("the end of every container", lambda: not running(stack), 300, every=1.0)
    summary = json.loads(stack.read("summary.json"))
    check_promises(summary)
    assert summary["steps"] == 300
