"""Who is here: hello, heartbeat, goodbye; and the answers that any message may get."""

from __future__ import annotations

from typing import Literal

from penstock.protocols.experience import Purpose
from penstock.protocols.messages.base import Message

Held = Purpose | Literal["turn"]
Holding = dict[Held, list[int]]
"""Numbers of groups, and of turns."""


class Hello(Message):
    """actor → broker: this incarnation of the actor is here. Answered by `Welcome`; fences older incarnations."""

    kind: str
    name: str
    host: str
    pid: int
    version: int = -1
    """The version of the weights that a rollout serves or a trainer holds; -1 for none."""
    digest: str = ""
    """The digest of that version."""
    holding: Holding = {}
    """Groups that this very process works on."""
    number: int = 0
    """Counts this process's hellos."""


class Welcome(Message):
    """broker → actor: you are a member."""

    run: str
    heartbeat_s: float


class Heartbeat(Message):
    """actor → broker, unasked: alive, with gauges for the dashboard."""

    gauges: dict[str, float] = {}
    holding: Holding = {}
    """Groups that it works on: their leases and offers are renewed, others expire."""


class HeartbeatAck(Message):
    """broker → actor: heard your heartbeat."""


class Waits(Message):
    """broker → actor: it waits for its store, or reads what this run had. It answers nothing meanwhile, and has not
    forgotten what it was asked."""


class Bye(Message):
    """actor → broker: leaving in good order; what it held is free again."""

    reason: str


class HelloNeeded(Message):
    """broker → actor: you are not a member (any more); say hello."""


class Fenced(Message):
    """broker → actor: a newer incarnation has your name; stop."""

    by: str


class Refused(Message):
    """Any answer that is not the one hoped for: ``code`` for programs, ``reason`` for people."""

    code: Literal["bad_message", "not_allowed", "not_ready", "not_held", "failed"]
    reason: str


class Ack(Message):
    """broker → actor: what you said is durable."""


class Stop(Message):
    """broker → actor: finish what you hold and exit 0."""

    reason: str


class Credit(Message):
    """actor → broker: this actor can take ``total`` items since hello number ``hello`` (groups for a rollout, work for
    a scorer). A running total, so that a lost or repeated message does no harm."""

    total: int
    hello: int = 0
