"""Programs of a run that sleep while a learner works (`programs.NAME.sleep`), and the processes that call them.

Files in the run's folder, ``turns/programs``: ``NAME.awake``, locked while the program may be called, and
``ACTOR.caller``, locked by a process that may have calls under way. Who puts a program to sleep lets go of its lock,
then waits for all callers'; a caller locks its own, then looks at all programs'. So whoever comes second sees the
first, and no call is under way while one of them sleeps. The kernel lets go of the locks of a process that dies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import structlog

from penstock.services.runtime.actor import ActorContext
from penstock.services.runtime.device_locks import Lock, Others
from penstock.services.runtime.device_turn import LOOK_S, LOOKED_AT_S, POLL_S, SAY_EVERY_S, TURNS

log = structlog.get_logger()

PROGRAMS = "programs"
AWAKE, CALLER = ".awake", ".caller"


class Admission:
    """Whether the program ``name`` of the run in ``folder`` may be called, as who wakes it says."""

    def __init__(self, folder: Path, name: str) -> None:
        here = folder / TURNS / PROGRAMS
        self._name, self._own, self._callers = name, Lock(here / f"{name}{AWAKE}", name), Others(here, CALLER)

    def open(self) -> bool:
        """It may be called, from now on; False: not yet, as long as somebody looks at that."""
        until = time.monotonic() + LOOKED_AT_S
        while not (mine := self._own.take()) and time.monotonic() < until:
            time.sleep(POLL_S)
        return mine

    def close(self, goes_on: Callable[[], bool] = lambda: True) -> None:
        """It may not; returns once no call is under way, or where ``goes_on`` says no."""
        self._own.give()
        began = said = time.monotonic()
        while (busy := self._callers.busy()) and goes_on():
            if time.monotonic() - said > SAY_EVERY_S:
                said = time.monotonic()
                whose = [lock.owner for lock in busy]
                log.warning("waiting for calls to end", program=self._name, of=whose, waited_s=round(said - began))
            time.sleep(POLL_S)


class Calls(Protocol):
    """What a caller has under way."""

    @property
    def under_way(self) -> int:
        """How many calls have begun and have not ended."""

    def hold(self) -> None:
        """None begins from now on."""

    def go(self) -> None:
        """They begin again."""


class NoCalls:
    """Of a caller that polls between two calls alone."""

    under_way = 0

    def hold(self) -> None:
        """There is none."""

    def go(self) -> None:
        """Nor was one held."""


def caller(context: ActorContext, config: Any, calls: Calls) -> Caller | None:
    """Of an actor whose ``calls`` may go to programs, for a run's whole config; None where none of these sleeps."""
    programs = tuple(config.sleepers)
    return Caller(context.folder, programs, context.name, calls) if programs else None


class Caller:
    """The process ``name``, whose ``calls`` may go to ``programs`` of the run in ``folder`` that sleep. It is polled
    as a `device_turn.Guest` is: by its loop, or, once it is `started`, by a thread."""

    def __init__(self, folder: Path, programs: Sequence[str], name: str, calls: Calls) -> None:
        here = folder / TURNS / PROGRAMS
        self._own = Lock(here / f"{name}{CALLER}", name)
        self._programs = [Lock(here / f"{program}{AWAKE}", program) for program in programs]
        self._calls, self._may_have, self._looked_at = calls, False, 0.0
        self._waits_since = self._said = time.monotonic()
        self.awake = False
        """Calls may begin."""
        calls.hold()

    def poll(self) -> bool:
        """Whether calls may begin, up to the next time; called often."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_S:
            return self.awake
        self._looked_at = now
        if self.awake and not self._all_awake():
            self.awake = False
            self._calls.hold()
        if not self.awake and self._may_have and not self._calls.under_way:
            self._own.give()
            self._may_have = False
        if not self.awake and not self._may_have and self._all_awake():
            self._begin()
        if self.awake:
            self._waits_since = self._said = now
        elif now - self._said > SAY_EVERY_S:
            self._said = now
            waits_for = [lock.owner for lock in self._programs if not lock.is_taken()]
            log.info("calls wait for programs to wake", waits_for=waits_for, waited_s=round(now - self._waits_since))
        return self.awake

    def start(self) -> Caller:
        """Polls from now on, as long as the process lives."""
        threading.Thread(target=self._run, name="caller", daemon=True).start()
        return self

    def _run(self) -> None:
        while True:
            self.poll()
            time.sleep(LOOK_S)

    def _begin(self) -> None:
        if not self._own.take():  # somebody looks at it in this instant
            return
        if self._all_awake():
            self._may_have = self.awake = True
            self._calls.go()
        else:
            self._own.give()

    def _all_awake(self) -> bool:
        return all(lock.is_taken() for lock in self._programs)
