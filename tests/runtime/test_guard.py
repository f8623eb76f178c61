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
STARTS = f"""
import subprocess, sys
from {guarded.__module__} import guarded
started = subprocess.Popen(guarded([sys.executable, "-c", {STUBBORN!r}], ["PATH"]), start_new_session=True)
print(started.pid, flush=True)
started.wait()
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
    parent = psutil.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE)
    parent.stdout.readline()
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


def test_one_whose_parent_ends_while_it_starts_ends_too() -> None:
    parent = subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE)
    assert parent.stdout
    guard = psutil.Process(int(parent.stdout.readline()))
    parent.kill()  # Python takes longer to start
    parent.wait(5)
    try:
        guard.wait(10)
    finally:
        if guard.is_running():
            guard.terminate()
