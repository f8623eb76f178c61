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
from penstock.services.runtime.sleepers import Answers

log = structlog.get_logger()

ASK_S = 0.2
"""Between two looks at whether one that was started again is ready."""
CLOSE_S = 0.5
"""It may wait for an answer, which the program's end gives it."""


class Keeper:
    """Of the program ``name``, which is awake and whose process is ``child``. It begins to sleep when this is made, in
    a run in ``folder``; from then on it sleeps and wakes as the other guests on ``gpus`` do. One that does not within
    ``patience_s``, or that dies, is started again by its supervisor, once its devices are not a learner's."""

    def __init__(
        self, name: str, program: ProgramConfig, child: Child, folder: Path, gpus: Sequence[str], patience_s: float
    ) -> None:
        self._name, self._program, self._child, self._patience_s = f"programs.{name}", program, child, patience_s
        self._turn = GuestsTurn(folder / TURNS, named(gpus), self._name)
        self._answers = Answers(folder, name)
        self._closing, self._loads = threading.Event(), threading.Event()
        self._loads.set()
        self._known: object = None
        """The process that was put to sleep, or was found ready."""
        child.may_start = self._loads.is_set
        self._sleep()
        self._thread = threading.Thread(target=self._run, name=f"keeper-{name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """It is not looked after any more, and may be ended."""
        self._closing.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            self._turn.enter()
            self._wake()
            guest = Guest(self._turn, self._sleep, self._wake)
            while not self._closing.is_set():
                guest.poll()
                if guest.awake and not self._is_known():
                    self._answers.end(self._goes_on)
                    self._wake()
                time.sleep(LOOK_S)
        except Exception as error:  # nobody would wake it again
            if self._goes_on():
                log.exception("a program is not looked after any more", program=self._name)
                self._child.fatal = f"{self._name} could not be put to sleep and woken: {error}"

    def _is_known(self) -> bool:
        return self._child.alive and self._child.process is self._known

    def _goes_on(self) -> bool:
        return not self._closing.is_set()

    def _sleep(self) -> None:
        """Whoever calls it has had an answer, and it has left its devices."""
        self._answers.end(self._goes_on)
        self._loads.clear()
        if self._child.alive:
            began = time.monotonic()
            self._known = self._child.process
            if why := refuses(self._program.sleep or "", self._patience_s):
                self._give_up("sleep", why)
            log.debug("a program sleeps", program=self._name, took_s=round(time.monotonic() - began, 3))

    def _wake(self) -> None:
        """It may be called: as it slept, or started again."""
        self._loads.set()
        while self._goes_on():
            began = time.monotonic()
            if self._is_known() and (why := refuses(self._program.wake or "", self._patience_s)):
                self._give_up("wake", why)
            elif self._child.alive and (why := self._is_late()):
                self._give_up("get ready", why)
            elif self._child.alive:
                self._known = self._child.process
                self._answers.begin()
                log.debug("a program is awake", program=self._name, took_s=round(time.monotonic() - began, 3))
                return
            self._closing.wait(ASK_S)

    def _give_up(self, what: str, why: str) -> None:
        """It is gone, and with it all that it has started."""
        process = self._child.process
        if self._goes_on() and process is not None:
            log.warning(f"a program does not {what}, and is ended", program=self._name, it=why)
            process.send_signal(signal.SIGTERM)
            process.wait(self._patience_s)

    def _is_late(self) -> str:
        """Why it is not ready, after `ready_s`; empty: it is, or has died."""
        began = time.monotonic()
        while self._program.ready and (why := lacks(self._program.ready)):
            if not self._child.alive or self._closing.is_set():
                return ""
            if time.monotonic() - began > self._program.ready_s:
                return f"{self._program.ready} {why} after {self._program.ready_s:g} s"
            time.sleep(ASK_S)
        return ""
