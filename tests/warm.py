"""Starts Penstock's commands as forks of a process that has loaded what they load: a run in a test is short, and would
spend most of its CPU seconds in imports. Some tests start the real thing: `tests/e2e/test_quickstart.py`, those of the
documents, of single actors, of what is light.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import BinaryIO

from penstock.pipeline.run.command import penstock
from penstock.pipeline.run.forking import Forked, ForkServer, can_fork

ROOT = Path(__file__).parents[1]
PROGRAM = Path(__file__).with_name("warm_server.py")

STDERR = "PENSTOCK_TESTS_STDERR"
"""A variable that names the file of a command's stderr, where it is not to be that of its stdout."""

Process = Forked | subprocess.Popen[bytes]


class WarmServer(ForkServer):
    """Forks commands, as the one of a run forks actors."""

    PROGRAM = (str(PROGRAM),)


@cache
def server() -> WarmServer:
    """Of this process."""
    there = tempfile.TemporaryDirectory(prefix="penstock-warm-")
    started = WarmServer(Path(there.name) / "stderr")
    atexit.register(there.cleanup)
    atexit.register(started.close)
    return started


def start(*arguments: str, output: BinaryIO, env: Mapping[str, str] | None = None, folder: Path = ROOT) -> Process:
    """``penstock ARGUMENTS`` in ``folder``, with ``env`` beside this process's variables, and a fork server of its own
    that is as warm. It ends with this process."""
    variables = {**os.environ, **(env or {})}
    if not can_fork():
        return subprocess.Popen(penstock(*arguments), stdout=output, stderr=output, env=variables, cwd=folder)
    with contextlib.chdir(folder):
        return server().fork(penstock(*arguments), variables, output, with_parent=True)


def run(
    *arguments: str, env: Mapping[str, str] | None = None, folder: Path = ROOT, seconds: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """The same, until it has ended."""
    with tempfile.TemporaryDirectory() as there:
        stdout, stderr = Path(there) / "stdout", Path(there) / "stderr"
        with stdout.open("wb") as output:
            process = start(*arguments, output=output, env={**(env or {}), STDERR: str(stderr)}, folder=folder)
        try:
            code = process.wait(seconds)
        finally:
            process.kill()
        said = stderr.read_text() if stderr.exists() else ""
        return subprocess.CompletedProcess(list(arguments), code, stdout.read_text(), said)
