"""Checkpoints of a learner beside its next steps, and what the broker is told of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import structlog

from penstock.protocols.mailbox import Mailbox
from penstock.protocols.messages import Checkpointed, Keep
from penstock.services.learning.checkpoint import Saver
from penstock.services.learning.handed_on import HandedOn
from penstock.services.learning.model_learner import ModelLearner
from penstock.services.learning.step_desk import ANSWER_DEADLINE_S, POLL_S
from penstock.services.runtime import checkpoint_folders, health

log = structlog.get_logger()


class Saving:
    """One checkpoint at a time. ``keep_best``: the broker says which of the old ones stay; so does the newest whose
    version is a multiple of ``landmark``, and, where somebody makes models of each such one in ``followed``, those that
    are not there yet."""

    def __init__(
        self,
        learner: ModelLearner,
        saver: Saver,
        mailbox: Mailbox,
        keep_best: bool,
        handed_on: HandedOn,
        landmark: int = 0,
        followed: Path | None = None,
    ) -> None:
        self._learner, self._saver, self._mailbox = learner, saver, mailbox
        self._handed_on = handed_on
        self._keep_best, self._landmark, self._followed = keep_best, landmark, followed
        self._written: Future[Path] | None = None
        self._version, self._folder = 0, Path()

    def begin(self, ledger_tail: Sequence[dict[str, Any]] = ()) -> None:
        """Begins to write the learner's version; none may be being written."""
        assert self._written is None
        begun = time.monotonic()
        self._written, self._version = self._saver.begin(ledger_tail), self._learner.version
        log.info("saving", version=self._version, staged_s=round(time.monotonic() - begun, 3))

    def poll(self) -> None:
        """Tells the broker of one that is done, and hands on what there is."""
        if self._written is not None and self._written.done():
            self._say(final=False)
        self._handed_on.poll()

    def finish(self, final: bool) -> None:
        """Waits for the one that is being written, if any; ``final``: the run ends with it."""
        if self._written is not None:
            while not wait_for([self._written], POLL_S).done:
                health.beat()
                self._learner.world.keep_awake()
            self._say(final)

    def hand_on(self, stopped: bool = False) -> None:
        """Until nothing is left to be handed on. What fails meanwhile is told at once; once the run is ``stopped`` it
        is not tried again."""
        if stopped:
            self._handed_on.hurry()
        told = self._handed_on.failed
        while self._handed_on.poll():
            if told != self._handed_on.failed and self._version:
                told = self._handed_on.failed
                self._tell(False)
            time.sleep(POLL_S)
            health.beat()
            self._learner.world.keep_awake()

    def _tell(self, final: bool) -> Keep:
        failed = self._handed_on.failed
        path = str(checkpoint_folders.path_of(self._folder, self._version))
        message = Checkpointed(version=self._version, path=path, final=final, then_failed=failed)
        answer = self._mailbox.ask(message, ANSWER_DEADLINE_S)
        assert isinstance(answer, Keep)
        return answer

    def close(self) -> None:
        """Until nothing is being written."""
        self._saver.close()
        self._handed_on.close()

    def _say(self, final: bool) -> None:
        """The broker may forget what the checkpoints of all learners cover."""
        assert self._written is not None
        path, self._written = self._written.result(), None
        self._folder = path.parent
        self._handed_on.add(self._version)
        if final and self._handed_on.held:  # it is there, and what is left to do takes as long as it takes
            self._tell(False)
            self.hand_on()
        answer = self._tell(final)
        spared = {*(answer.versions if self._keep_best else ()), *self._handed_on.held}
        if self._landmark:
            newest = self._version // self._landmark * self._landmark
            done = max(checkpoint_folders.versions(self._followed), default=0) if self._followed else newest
            spared |= {newest, *range((done // self._landmark + 1) * self._landmark, newest, self._landmark)}
        self._saver.remove_old(spared, self._handed_on.wanted)
