"""A process whose main loop hangs is ended; one that was only stopped is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

LOOP = """
import sys, time
from penstock.services.runtime import health
from penstock.services.runtime.watchdog import ended_if_hung

def turn():
    health.beat()
    print("turned", flush=True)

with ended_if_hung("rollout-0", 1.0, "rollout.timeout_s"):
    for _ in range(int(sys.argv[1])):
        turn()
        time.sleep(0.2)
    time.sleep(float(sys.argv[2]))
"""


def loop(turns: int, then_s: float) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", LOOP, str(turns), str(then_s)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_process_whose_loop_hangs_ends_and_says_where_it_was() -> None:
    process = loop(2, 60)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert 'File "<string>", line' in said  # where it was
    assert said.splitlines()[-1].startswith("rollout-0: its main loop hung for 1 s (rollout.timeout_s)")


def test_one_whose_threads_never_run_is_ended_too() -> None:
    """A search that goes back and forth keeps Python's lock all the while."""
    held = LOOP.replace("time.sleep(float(sys.argv[2]))", "re.match('(a+)+$', 'a' * 40 + 'b')")
    held = held.replace("with ended", "watchdog.HELD_S = 1.0\nwith ended").replace(
        "import sys, time", "import re, sys, time\nfrom penstock.services.runtime import watchdog"
    )
    done = subprocess.run([sys.executable, "-c", held, "2"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and 'File "<string>", line' in done.stderr


def test_one_that_turns_or_was_stopped_for_longer_goes_on() -> None:
    process = loop(12, 0)
    assert process.stdout
    process.stdout.readline()
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(2.5)
    os.kill(process.pid, signal.SIGCONT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0, said
