"""Who has one program of others sleep while a learner works on its devices, and wakes it (`programs.NAME.sleep`)."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from penstock.pipeline.config.programs import ProgramConfig
from penstock.pipeline.run.answering import lacks, refuses
from penstock.pipeline.run.supervisor import Child
from penstock.services.runtime.device_turn import LOOK_S, TURNS, Guest, GuestsTurn, named
from penstock.services.runtime.sleepers import Admission

log = structlog.get_logger()

ASK_S = 0.2
"""Between two looks at whether one that was started again is ready."""
CLOSE_S = 1.0


class Keeper:
    """Of the program ``name``, which is awake and whose process is ``child``. It is put to sleep at once, in a run in
    ``folder``; from then on it sleeps and wakes as the other guests on ``gpus`` do, in a thread of its own. One that
    does not within `ready_s` is ended. One that has died is started again by its supervisor while it is a guest's turn:
    as all guests it begins alone."""

    def __init__(self, name: str, program: ProgramConfig, child: Child, folder: Path, gpus: Sequence[str]) -> None:
        self._name, self._program, self._child = f"programs.{name}", program, child
        self._turn = GuestsTurn(folder / TURNS, named(gpus), self._name)
        self._admission = Admission(folder, name)
        self._closing, self._slept = threading.Event(), threading.Event()
        self._known: object = child.process
        """The process that is looked after: one that was seen to be ready."""
        child.held = True
        self._thread = threading.Thread(target=self._run, name=f"keeper-{name}", daemon=True)
        self._thread.start()

    @property
    def slept(self) -> bool:
        """It has been put to sleep for the first time."""
        return self._slept.is_set()

    def close(self) -> None:
        """It is not looked after any more, and may be ended."""
        self._closing.set()

    def join(self) -> None:
        """Once it has ended."""
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            self._sleep()
            self._slept.set()
            while self._goes_on():
                self._turn.enter(self._goes_on)
                self._wake()
                guest = Guest(self._turn, self._sleep, self._wake)
                while self._goes_on() and self._is_known():
                    guest.poll()
                    time.sleep(LOOK_S)
                self._leave()
        except Exception as error:  # nobody would wake it again
            if self._goes_on():
                log.exception("a program is not looked after any more", program=self._name)
                self._child.fatal = f"{self._name} could not be put to sleep and woken: {error}"
        finally:
            self._closing.set()
            self._leave()

    def _goes_on(self) -> bool:
        return not self._closing.is_set()

    def _is_known(self) -> bool:
        return self._child.alive and self._child.process is self._known

    def _leave(self) -> None:
        """It has died, and has nothing on its devices."""
        self._admission.close(self._goes_on)
        self._turn.give()
        self._turn.started()

    def _sleep(self) -> None:
        """Whoever calls it has had an answer, and it has left its devices."""
        began = time.monotonic()
        self._admission.close(self._goes_on)
        drained = time.monotonic()
        if self._is_known() and (why := refuses(self._program.sleep or "", self._program.ready_s)):
            self._end("sleep", why)
        took_s = round(time.monotonic() - drained, 3)
        log.debug("a program sleeps", program=self._name, calls_s=round(drained - began, 3), took_s=took_s)

    def _wake(self) -> None:
        """It may be called: as it slept, or as it was started again. Or it has ended."""
        began = time.monotonic()
        if self._is_known() and (why := refuses(self._program.wake or "", self._program.ready_s)):
            self._end("wake", why)
        elif why := self._lacks():
            self._end("get ready", why)
        else:
            while self._goes_on() and not self._admission.open():
                pass
            log.debug("a program is awake", program=self._name, took_s=round(time.monotonic() - began, 3))

    def _lacks(self) -> str:
        """Why it is not ready, after `ready_s`; empty: it is. Of one that has died its supervisor starts another."""
        again, deadline = not self._is_known(), time.monotonic() + self._program.ready_s
        self._child.held = not again
        try:
            while (why := self._looked_at()) and time.monotonic() < deadline and self._goes_on():
                if not again and not self._child.alive:
                    break
                time.sleep(ASK_S)
            return why
        finally:
            with self._child.starting:  # from here on none is, that had been looked at before
                self._child.held = True

    def _looked_at(self) -> str:
        process = self._child.process
        if not self._child.alive:
            return "it has died"
        why = lacks(self._program.ready or "")
        if not why:
            self._known = process
        return why

    def _end(self, what: str, why: str) -> None:
        """It is gone, and with it all that it has started."""
        process = self._child.process
        if self._goes_on() and process is not None:
            log.warning(f"a program does not {what}, and is ended", program=self._name, why=why)
            process.send_signal(signal.SIGTERM)
            process.wait(self._program.ready_s)
