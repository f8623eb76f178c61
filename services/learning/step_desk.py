"""How a learner hears from the broker, and takes its steps."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any

import structlog

from penstock.protocols.mailbox import DeadlineError, RefusedError
from penstock.protocols.messages import Batch, Exhausted, HelloNeeded, Message, Skip, Stop, Take
from penstock.services.runtime import failpoint, health
from penstock.services.runtime.actor import Actor
from penstock.services.runtime.errors import SetupError

log = structlog.get_logger()

TAKE_DEADLINE_S = 60.0
ANSWER_DEADLINE_S = 120.0
"""For anything else that a learner says."""
POLL_S = 0.2


class StepDesk:
    """``each_turn`` is called whenever it has listened, ``keep_awake`` besides while it waits for the broker."""

    def __init__(
        self, actor: Actor, each_turn: Callable[[], None], keep_awake: Callable[[], None] = lambda: None
    ) -> None:
        self._actor, self._each_turn, self._keep_awake = actor, each_turn, keep_awake
        self._point = "taken" if actor.kind == "trainer" else f"{actor.kind}-taken"
        self.stopped: str | None = None
        """Why the broker wants the learner to end."""
        self.waited_s = 0.0
        """How long the last batch took to come."""

    def hear(self, patience_s: float = 0.0) -> None:
        """What the broker says unasked."""
        inbox = self._actor.mailbox.inbox
        try:
            event: object = inbox.get(timeout=patience_s) if patience_s else None
            while True:
                if isinstance(event, Stop):
                    self.stopped = self.stopped or event.reason
                elif isinstance(event, Exception):  # fenced by the broker, or the mailbox has failed
                    raise event
                elif event is not None and not isinstance(event, HelloNeeded):
                    log.warning("unexpected message", type=type(event).__name__)
                event = inbox.get_nowait()
        except queue.Empty:
            pass
        self._each_turn()
        health.beat()

    def wait(self, future: Future[Any]) -> Any:
        """The future's result. Raises what it holds."""
        while not wait_for([future], POLL_S).done:
            self.hear()
        return future.result()

    def until_stopped(self) -> str:
        """Waits until the broker has said why to end."""
        while self.stopped is None:
            self.hear(POLL_S)
            self._keep_awake()
        return self.stopped

    def take(self, step: int, after: Sequence[int] = ()) -> Batch | Skip | None:
        """The batch of ``step``, or which step a learner that follows the trainer is to go on with; None when the run
        is over, or the learner is to stop. ``after`` are the groups of the step before, where it knows. A wait that
        lasts is logged with its reason."""
        waited, deadline_s = time.monotonic(), TAKE_DEADLINE_S
        while True:
            try:
                take = Take(step=step, after=list(after))  # a batch that is long on its way is not asked for again
                reply = self._answer(self._actor.mailbox.ask_later(take, deadline_s, again=False))
            except RefusedError as refusal:
                if "cannot be redone" in str(refusal):
                    raise SetupError(
                        f"{refusal}. That checkpoint, or what the store had, is gone from the run's folder: put it "
                        "back; or, to go on from the newest that there is: penstock rollback RUN VERSION"
                    ) from refusal
                if refusal.code != "not_ready":
                    raise
                log.warning(
                    "waiting for a batch", step=step, waited_s=round(time.monotonic() - waited), reason=str(refusal)
                )
                continue
            except DeadlineError as late:
                log.warning("waiting for the broker", step=step, error=str(late))
                deadline_s *= 2  # it may have been on its way for as long as that
                continue
            self._actor.gauges["wait_s"] = self.waited_s = time.monotonic() - waited
            if isinstance(reply, Exhausted):
                log.info("no more steps", steps=reply.steps, reason=reply.reason)
                return None
            assert reply is None or isinstance(reply, Batch | Skip)
            failpoint.reach(self._point, step)
            return reply

    def _answer(self, future: Future[Message]) -> Message | None:
        """The future's result; None as soon as the learner is to stop."""
        while not wait_for([future], POLL_S).done:
            self.hear()
            self._keep_awake()
            if self.stopped is not None:
                return None
        self.hear()
        return None if self.stopped is not None else future.result()
