"""What an actor has finished, said until the broker has called it durable; and the credit that it gives for more."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import structlog

from penstock.protocols.experience import Group, as_bytes, summarize
from penstock.protocols.mailbox import DeadlineError
from penstock.protocols.messages import Credit, Failed, Finished, Generated, Lease, Message
from penstock.protocols.messages.membership import Held
from penstock.protocols.packed_groups import pack_group
from penstock.protocols.wire import WireError
from penstock.services.runtime.actor import Actor
from penstock.services.runtime.files import open_lines

log = structlog.get_logger()

DURABLE_DEADLINE_S = 120.0
DRAIN_S = 10.0
RETAIN_S = 5.0

Key = tuple[Held, int]
Said = Finished | Failed | Generated


@dataclass(frozen=True)
class Answered:
    """The broker's answer to what was `Said`, posted to the actor's inbox."""

    message: Said
    error: BaseException | None


def key_of(message: Lease | Said) -> Key:
    """What the broker knows it by."""
    return ("turn", message.id) if isinstance(message, Generated) else (message.purpose, message.number)


class Outbox:
    """Of an actor that is leased groups, or turns. ``limit``: how many it may hold at once. Used from the actor's one
    thread, but for `say` and ``in``.

    Groups for training that became durable are in ``logs/NAME.finished.jsonl``, which the run's summary is checked
    against.
    """

    def __init__(self, actor: Actor, limit: Callable[[], int]) -> None:
        self._actor, self._limit = actor, limit
        self._open: set[Key] = set()
        self._retained: deque[tuple[float, Finished]] = deque()
        """What became durable lately: said again to a broker that was restarted, whose store may have lost it."""
        self._closed = self._held_at_hello = self._hello = 0
        self._credited = -1
        finished = actor.context.folder / "logs" / f"{actor.context.name}.finished.jsonl"
        finished.parent.mkdir(parents=True, exist_ok=True)
        self._finished = open_lines(finished)

    def __contains__(self, key: Key) -> bool:
        return key in self._open

    def joined(self) -> None:
        """The broker has heard the first hello: it may give us something."""
        self._hello = self._actor.hellos
        self.give_credit()

    def forgotten(self) -> None:
        """The broker has forgotten us: our leases are free, our credit is void."""
        if self._hello == self._actor.hellos:
            return  # this is already of that hello, and what was given since counts
        self._closed, self._credited, self._hello = 0, -1, self._actor.hellos
        self._held_at_hello = len(self._actor.held)
        self.give_credit()
        for _, message in self._retained:
            if key_of(message) not in self._open:
                self._closed -= 1  # its room was given back when it first became durable
                self.say(message)
        self._retained.clear()

    def say(self, message: Said) -> None:
        """Says it until the broker has called it durable."""
        self._open.add(key_of(message))
        self._send(message)

    def answered(self, answer: Answered) -> None:
        """The broker has, or never will have, what was said."""
        message, key = answer.message, key_of(answer.message)
        if isinstance(answer.error, DeadlineError):
            log.warning("not durable yet; sending again", what=key, error=str(answer.error))
            self._send(message)
            return
        self._open.discard(key)
        self._actor.put_down(*key)
        if answer.error:
            log.error("the broker refused an answer", what=key, error=str(answer.error))
        elif isinstance(message, Finished) and message.purpose == "train":
            self._remember(message)
        self.dismiss()

    def dismiss(self) -> None:
        """Something that we were given needs no more of us: there is room for another."""
        self._closed += 1
        self.give_credit()

    def give_credit(self) -> None:
        """Says how much we can take, where that is more than was said before."""
        total = self._limit() - self._held_at_hello + self._closed
        if total > self._credited:
            self._credited = total
            self._actor.mailbox.tell(Credit(total=total, hello=self._hello))

    def drain(self, read: Callable[[], object], linger_s: float = 0.0) -> None:
        """Before the actor leaves: what is finished shall be durable. ``read`` handles what arrives, for at least
        ``linger_s`` seconds."""
        began = time.monotonic()
        while time.monotonic() - began < (DRAIN_S if self._open else linger_s):
            read()
        if self._open:
            log.warning("left with what is not durable", what=sorted(self._open))

    def _send(self, message: Said) -> None:
        try:
            self._ask(message)
        except WireError as error:  # whoever had the group next could not send it either
            if not isinstance(message, Finished):
                raise
            log.error("a group cannot be sent", group=message.number, error=str(error))
            about: dict[str, Any] = {name: getattr(message, name) for name in ("purpose", "number", "attempt")}
            self._ask(Failed(**about, error=f"its answers cannot be sent: {error}"[:340]))

    def _ask(self, message: Said) -> None:
        def answered(future: Future[Message]) -> None:
            self._actor.mailbox.post(Answered(message, future.exception()))

        self._actor.mailbox.ask_later(message, DURABLE_DEADLINE_S, patient=True).add_done_callback(answered)

    def _remember(self, message: Finished) -> None:
        row = {"group": message.number, "attempt": message.attempt, "tokens": message.summary.sampled}
        self._finished.write(json.dumps(row | {"time": time.time()}) + "\n")
        self._retained.append((time.monotonic(), message))
        while self._retained and time.monotonic() - self._retained[0][0] > RETAIN_S:
            self._retained.popleft()


def answer_of(lease: Lease, made: Group | str) -> Finished | Failed:
    """What is said of a lease: its group, or the reason why there is none."""
    about: dict[str, Any] = {"purpose": lease.purpose, "number": lease.number, "attempt": lease.attempt}
    if isinstance(made, Group):
        return Finished(**about, summary=summarize(made), experience=as_bytes(pack_group(made)))
    log.warning("group failed", group=lease.number, prompt=lease.prompt.index, error=made)
    return Failed(**about, error=f"row {lease.prompt.index}: {made}"[:340])
