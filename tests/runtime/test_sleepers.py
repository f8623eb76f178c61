"""Nobody calls a program while it sleeps: whoever comes when, and whoever dies."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

from penstock.services.runtime.sleepers import Admission, Caller, NoCalls
from tests.e2e.test_join import until

PROGRAM = """
import pathlib, sys, time
from penstock.services.runtime.sleepers import Caller, NoCalls
caller = Caller(pathlib.Path(sys.argv[1]), ("judge",), "reward-9", NoCalls())
while not caller.poll():
    time.sleep(0.01)
print("calls", flush=True)
time.sleep(600)
"""


class Calling:
    """Begins a call whenever it may; each takes a while."""

    def __init__(self, seconds: float) -> None:
        self.under_way, self.most, self.done, self._held, self._seconds = 0, 0, 0, False, seconds

    def hold(self) -> None:
        self._held = True

    def go(self) -> None:
        self._held = False

    def turn(self) -> None:
        if not self._held and not self.under_way:
            self.under_way, self._until = 1, time.monotonic() + self._seconds
        if self.under_way and time.monotonic() > self._until:
            self.under_way, self.done = 0, self.done + 1


def test_no_call_is_under_way_while_a_program_sleeps(tmp_path: Path) -> None:
    """Of two programs, which sleep when they like; three callers, of whom one is fast."""
    asleep, wrong, over = [False, False], [], threading.Event()
    calls = [Calling(seconds) for seconds in (0.002, 0.02, 0.05)]

    def call(number: int) -> None:
        caller = Caller(tmp_path, ("one", "two"), f"reward-{number}", calls[number])
        while not over.is_set():
            caller.poll()
            calls[number].turn()
            time.sleep(0.001)

    def keep(number: int) -> int:
        admission, slept, begun = Admission(tmp_path, ("one", "two")[number]), 0, time.monotonic()
        while time.monotonic() < begun + 4:
            admission.open()
            time.sleep(0.03 + 0.02 * number)
            admission.close()
            asleep[number] = True
            for _ in range(5):
                wrong.extend(each for each in calls if each.under_way)
                time.sleep(0.004)
            asleep[number], slept = False, slept + 1
        return slept

    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(3)]
    keepers = [threading.Thread(target=keep, args=(number,), daemon=True) for number in range(2)]
    for thread in (*threads, *keepers):
        thread.start()
    for thread in keepers:
        thread.join(30)
        assert not thread.is_alive()
    over.set()
    for thread in threads:
        thread.join(5)
    assert not wrong and all(each.done > 3 for each in calls), [each.done for each in calls]


def test_who_dies_with_calls_under_way_keeps_nobody_awake(tmp_path: Path) -> None:
    """And who may not begin yet holds up nobody."""
    admission, idle = Admission(tmp_path, "judge"), Caller(tmp_path, ("judge",), "reward-0", NoCalls())
    assert not idle.poll()
    admission.open()
    child = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout and child.stdout.readline() == "calls\n"
    until(idle.poll, "the other caller")
    ended = threading.Event()
    threading.Thread(target=lambda: (admission.close(), ended.set()), daemon=True).start()
    until(lambda: not idle.poll(), "that it sees it")
    assert not ended.wait(0.3), "the other has not said that its calls are over"
    child.kill()
    assert ended.wait(10)
    child.wait()
    time.sleep(0.02)
    assert not idle.poll()
    admission.open()
    until(idle.poll, "that it is called again")
