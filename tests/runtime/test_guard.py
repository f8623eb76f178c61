"""A program that is not ours ends with whoever asked for it, and all that it has started with it."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from penstock.services.runtime.guard import NOT_FOUND, guarded

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print(child.pid, flush=True)
time.sleep(100)
"""


def test_exit_code_and_pipes_are_the_programs() -> None:
    program = "import os, sys; print(sys.stdin.read().upper(), os.environ.get('A'), os.environ.get('B')); sys.exit(5)"
    given = {**os.environ, "A": "1", "B": "2"}
    command = guarded([sys.executable, "-c", program], ["A"])
    done = subprocess.run(command, input="a", capture_output=True, text=True, env=given)
    assert (done.returncode, done.stdout) == (5, "A 1 None\n")
    killed = subprocess.run(guarded([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], []))
    assert killed.returncode == 128 + 9
    lost = subprocess.run(guarded(["/no/such/program"], []), capture_output=True, text=True)
    assert lost.returncode == NOT_FOUND and "/no/such/program: No such file" in lost.stderr


@pytest.mark.parametrize("whom", ["parent", "guard", "program"])
def test_what_it_has_started_ends_too(whom: str) -> None:
    command = guarded([sys.executable, "-c", STUBBORN], ["PATH"])
    starts = f"import subprocess; subprocess.Popen({command!r}, start_new_session=True).wait()"
    parent = psutil.Popen([sys.executable, "-c", starts], stdout=subprocess.PIPE)
    grandchild = psutil.Process(int(parent.stdout.readline()))
    program = grandchild.parent()
    guard = program.parent()
    processes = [guard, program] if whom == "guard" else [guard, program, grandchild]
    try:
        {"parent": parent, "guard": guard, "program": program}[whom].kill()
        gone, alive = psutil.wait_procs(processes, 20)
        assert not alive, alive
        assert len(gone) == len(processes)
    finally:
        for each in (parent, guard, program, grandchild):
            if each.is_running():
                each.kill()
        parent.wait(5)
