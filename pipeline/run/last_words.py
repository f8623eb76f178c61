"""What an actor says when it dies."""

from __future__ import annotations

import os
from contextlib import closing

import structlog

from penstock.pipeline.run import crashes
from penstock.protocols.mailbox import DeadlineError, RefusedError
from penstock.protocols.messages import Bye, StopRun
from penstock.services.runtime.actor import ActorContext
from penstock.services.runtime.errors import EXIT_SETUP
from penstock.services.runtime.plain import plain
from penstock.services.runtime.plugins import UserCodeError, describe
from penstock.services.runtime.registry import ActorSpec

log = structlog.get_logger()

TELL_S = 10.0


def last_words(error: Exception, context: ActorContext, name: str, step: int, shared: bool) -> tuple[int, str]:
    """Tells stderr what ``name`` dies of; returns its exit code, and what was said. ``shared``: with other ranks, one
    of which may be what it dies of: that one's words are those of the actor."""
    said = str(error) if isinstance(error, UserCodeError) else describe(error)
    code = 1
    if crashes.disk_is_full(error):
        where = getattr(error, "filename", None) or context.folder
        code, said = EXIT_SETUP, f"nothing can be written to {where}; free some space: {said}"
    elif crashes.again(context.folder, name, error, step):
        where = f" at step {step}" if step >= 0 else ""
        code, said = EXIT_SETUP, f"the same failure twice{where}: {said}"
    said = plain(said)
    who = f"{name} (a rank)" if shared and code == 1 and not crashes.is_own(error) else context.name
    os.write(2, f"{who}: {said}\n".encode())
    return code, said


def end_run(spec: ActorSpec, context: ActorContext, said: str, supervised: bool) -> None:
    """A learner that would only die again has the broker end the run, where no supervisor does: containers would start
    it for ever. Of other kinds there are several, or there may be."""
    if not spec.learns or supervised or not context.broker:
        return
    from penstock.pipeline.observe.client import join

    try:
        with closing(join(context.broker, context.keys)) as mailbox:
            mailbox.ask(StopRun(reason=f"{context.name}: {said}", failed=True), TELL_S)
            mailbox.tell(Bye(reason="has said what it died of"))
    except (DeadlineError, RefusedError) as error:
        log.warning("the broker could not be told", error=str(error))
