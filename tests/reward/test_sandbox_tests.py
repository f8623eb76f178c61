"""Programs that are run by a sandbox elsewhere: a server that answers as SandboxFusion does, and runs them for real."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar

import pytest

from penstock.services.reward.functions.code_tests import code_tests
from penstock.services.reward.functions.sandbox_tests import sandbox_tests
from penstock.services.runtime import asking
from penstock.services.runtime.asking import AskingError
from tests.reward.serving import serving

LOCK = threading.Lock()
RUN = {"python": [sys.executable, "-I", "-c"], "bash": ["bash", "-c"]}


class Sandbox(BaseHTTPRequestHandler):
    before: ClassVar[list[tuple[int, dict[str, Any]]]] = []
    """What it answers first, in place of running anything."""
    asked: ClassVar[list[dict[str, Any]]] = []
    now: ClassVar[int] = 0
    most: ClassVar[int] = 0
    """That it has had at once."""

    def do_POST(self) -> None:
        assert self.path == "/run_code"
        told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(told)
        with LOCK:
            Sandbox.now += 1
            Sandbox.most = max(Sandbox.most, Sandbox.now)
        status, said = self.before.pop(0) if self.before else (200, self._ran(told))
        with LOCK:
            Sandbox.now -= 1
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())

    def _ran(self, told: dict[str, Any]) -> dict[str, Any]:
        try:
            done = subprocess.run(
                [*RUN[told["language"]], told["code"]], input=told["stdin"], capture_output=True, text=True,
                timeout=told["run_timeout"],
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"status": "Failed", "message": "", "run_result": {"status": "TimeLimitExceeded"}}
        ran = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
        return {"status": "Failed" if done.returncode else "Success", "message": "", "run_result": ran}

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(asking, "FIRST_WAIT_S", 0.02)
    Sandbox.before.clear(), Sandbox.asked.clear()
    Sandbox.most = 0
    with serving(Sandbox) as address:
        yield f"{address}/"


def reward(url: str, response: str, truth: Any, **options: Any) -> float:
    return asyncio.run(sandbox_tests(response, truth, url, **options))


ADD = "Here:\n```python\nfrom __future__ import annotations\ndef add(a: List, b):\n    return a + b\n```\n"
SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}


@pytest.mark.parametrize(
    ("response", "truth", "options", "wanted"),
    [
        (ADD, ["assert add(1, 2) == 3", "assert add(0, 0) == 0"], {}, 1.0),
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 1) == 3"], {}, 0.0),
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 1) == 3"], {"partial": True}, 0.5),
        (ADD, {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}, {}, 1.0),
        ("import sys; sys.exit(0)", ["assert add(1, 2) == 3"], {}, 0.0),
        ("print(sum(map(int, input().split())))", SUMS, {}, 1.0),
        ("while True: pass", SUMS, {"seconds": 0.5}, 0.0),
        ("print(1 / 3)", {"inputs": [""], "outputs": ["0.333333"]}, {"tolerance": 1e-5}, 1.0),
        ("pass", {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}, {}, 0.0),
        (
            "class Solution:\n    def merge(self, a, b):\n        return sorted(a + b)",
            {"fn_name": "merge", "inputs": [[[3], [1]]], "outputs": [[1, 3]]},
            {},
            1.0,
        ),
        (
            "def power(a, b, m):\n    return pow(a, b, m)",
            {"fn_name": "power", "inputs": [[2, 5, 7]], "outputs": [4]},
            {},
            1.0,
        ),
        ("import io, sys\nsys.stdout = io.StringIO()\nadd = lambda a, b: a + b", "assert add(1, 2) == 3", {}, 1.0),
        ("import atexit\natexit.register(print, 'bye')\nadd = lambda a, b: a + b", "assert add(1, 2) == 3", {}, 1.0),
        (
            "import pickle\nclass A:\n    pass\nadd = lambda a, b: pickle.loads(pickle.dumps(A()))",
            "assert add(1, 2)",
            {},
            1.0,
        ),
    ],
)
def test_what_passes_here_passes_there(
    url: str, response: str, truth: Any, options: dict[str, Any], wanted: float
) -> None:
    assert reward(url, response, truth, **options) == wanted == code_tests(response, truth, **options)


def test_the_program_is_the_last_block_of_its_language(url: str) -> None:
    answer = "```python\nprint(3)\n```\n```sh\nread a b; echo $((a + b))\n```"
    assert reward(url, answer, SUMS, language="bash") == 1.0
    assert reward(url, answer, SUMS) == 0.0


def test_so_many_tests_are_asked_at_once(url: str) -> None:
    truth = {"inputs": [""] * 9, "outputs": ["3"] * 9}
    assert reward(url, "import time\ntime.sleep(0.1)\nprint(3)", truth, at_once=2) == 1.0
    assert len(Sandbox.asked) == 9 and Sandbox.most == 2


def test_it_is_told_its_limits(url: str) -> None:
    reward(url, "print(3)", {"inputs": ["1"], "outputs": ["3"]}, seconds=2, compile_seconds=9, memory_mb=64)
    (told,) = Sandbox.asked
    assert (told["run_timeout"], told["compile_timeout"], told["memory_limit_MB"]) == (2, 9, 64)
    assert told["code"] == "print(3)" and told["stdin"] == "1" and told["language"] == "python"


def test_a_busy_sandbox_is_asked_again_and_one_that_runs_nothing_costs_the_reward(url: str) -> None:
    truth = {"inputs": ["1"], "outputs": ["3"]}
    Sandbox.before[:] = [(503, {}), (504, {})]
    assert reward(url, "print(3)", truth) == 1.0 and len(Sandbox.asked) == 3
    Sandbox.before[:] = [(200, {"status": "SandboxError", "message": "no room"})]
    with pytest.raises(AskingError, match='it has run nothing: SandboxError: "no room"'):
        reward(url, "print(3)", truth)
    Sandbox.before[:] = [(200, {"detail": "what?"})]
    with pytest.raises(AskingError, match="its answer is none of SandboxFusion's"):
        reward(url, "print(3)", truth)


def test_tests_of_another_language_are_inputs_and_outputs(url: str) -> None:
    with pytest.raises(ValueError, match="tests of cpp are inputs and outputs"):
        reward(url, "int main() {}", ["assert add(1, 2) == 3"], language="cpp")
    assert not Sandbox.asked
