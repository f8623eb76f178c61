"""The asking side of the wire: `Mailbox`, for actors. `router_server` has the other; nobody else owns sockets.

An actor's DEALER socket lives in a thread of its own, so heartbeats go out while the actor computes; the actor talks to
that thread through queues. Requests carry an id and a deadline and are sent again until answered, which is safe because
everything the broker does is idempotent. The broker's ROUTER socket is used from the broker's one thread.

Nothing is dropped silently: high-water marks are off, and what is in flight is bounded by credit (`messages.Credit`).
"""

from __future__ import annotations

import itertools
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any

import structlog
import zmq

from penstock.protocols import wire
from penstock.protocols.connection import LINGER_MS, Connection, is_address
from penstock.protocols.keys import ClientKeys, is_loopback
from penstock.protocols.messages import (
    Fenced,
    HeartbeatAck,
    HelloNeeded,
    Message,
    Refused,
    Resumed,
    Waits,
    Welcome,
    from_envelope,
    to_envelope,
)

log = structlog.get_logger()

RESEND_S = 5.0
"""A request without an answer is sent again after this."""
SLOW_LINE = 1 << 20
"""Bytes a second: what is still on its way by such a line is not sent once more behind itself."""
MOST_RESEND_S = 60.0
"""One whose answer may take long is sent again less and less often, down to this."""

WAITS_S = 60.0
"""What waits for an answer has at least so long left whenever the broker says that it waits itself."""

LATE_S = 5.0
"""So long after its deadline at the latest a request has its answer, or the error that there is none."""

BESIDE = "~beats"
"""Heartbeats, and their answers, have a connection of their own, by this name: on the other they would wait behind what
is large, and whoever is heard of no more counts as dead."""

LASTING_S = 5.0
"""A line that broke sooner may have broken of what it was given: less and less soon it is given that again."""
REHELLO_S, MOST_REHELLO_S = 0.5, 30.0
"""Between two hellos to a broker that does not know this actor; longer, up to the second, while one may be on its way
behind what is large."""


class DeadlineError(TimeoutError):
    """No answer in time; names the request and who was waited for."""


class FencedError(RuntimeError):
    """A newer incarnation of this actor has taken its name: this process must end."""


class RefusedError(RuntimeError):
    """The peer answered `Refused`."""

    def __init__(self, refusal: Refused) -> None:
        super().__init__(refusal.reason)
        self.code = refusal.code


class AddressError(OSError):
    """An address that cannot be bound or is malformed; says what to do."""


@dataclass(slots=True)
class _Deadline:
    """Its future has it, too: of the request itself neither would ever be let go of."""

    at: float


@dataclass(slots=True)
class _Request:
    frames: list[bytes | memoryview]
    what: str
    future: Future[Message]
    deadline: _Deadline
    resend_at: float
    pause_s: float
    """Before it is sent the next time."""
    most_pause_s: float
    """Each pause is twice the one before, up to this."""


def answer_to(asked: Future[Message], within_s: float) -> Message:
    """Of `Mailbox.ask_later`. Raises what `Mailbox.ask` does, and `DeadlineError` where even the mailbox's own thread
    says nothing ``within_s``."""
    try:
        return asked.result(within_s)
    except DeadlineError:
        raise
    except TimeoutError:
        raise DeadlineError("the mailbox's thread does not answer") from None


def incarnation_of(name: str) -> str:
    """A new identity, ``name#incarnation``. They are ordered by when they began, so that the broker knows the newer
    one."""
    return f"{name}#{time.time_ns():016x}"


def is_yet_to_come(incarnation: str) -> bool:
    """It began later than now: a clock was set back since, and which of two began first it does not say."""
    try:
        return int(incarnation, 16) > time.time_ns()
    except ValueError:  # not one of ours
        return False


class Mailbox:
    """An actor's connection to the broker.

    ``identity`` is ``name#incarnation``: the broker fences by it. ``inbox`` holds what the broker sends unasked, and
    what the actor's own threads `post`. ``beat`` makes the message that is told every ``beat_s``; ``hello`` those that
    are said when the broker no longer knows this actor, before anything else is sent again. Raises `AddressError` where
    ``address`` is none.
    """

    def __init__(self, address: str, identity: str, keys: ClientKeys | None = None) -> None:
        if not is_address(address):
            raise AddressError(f"{address!r} is not an address such as tcp://127.0.0.1:5555")
        self.address, self.identity, self._keys = address, identity, keys
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.beat: Callable[[], Message] | None = None
        self.beat_s = 1.0
        self.hello: Callable[[], list[Message]] | None = None
        self.arrived: Callable[[Message], None] | None = None
        """Told of every message that was not asked for as it comes in, from the mailbox's thread."""
        self.handlers: dict[type[Message], Callable[[Any], None]] = {}
        """Messages of these types go to a handler, in the mailbox's thread, and not to the inbox: it must return at
        once."""
        self.waits_along = False
        """What it has asked for waits as long as the broker says that it waits itself; not of whoever looks after the
        store, or only looks on."""
        self.fenced: FencedError | None = None
        self.heard_at = time.monotonic()
        """When the broker last sent anything, on the monotonic clock."""
        self._heard = False
        self._hello_next = 0.0
        """When the next hello may be said to a broker that has not answered the last one."""
        self._ids = itertools.count(1)
        self._outgoing: queue.SimpleQueue[_Request | list[bytes | memoryview]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._closing = threading.Event()
        self._linger_ms = LINGER_MS
        self._ended = "the mailbox was closed"
        self._thread = threading.Thread(target=self._run, name="mailbox", daemon=True)
        self._thread.start()

    def ask(self, message: Message, deadline_s: float) -> Message:
        """Sends ``message`` and waits for its answer: ``deadline_s``, or longer (`waits_along`). Raises
        `DeadlineError`, `RefusedError` or `FencedError`."""
        asked = self.ask_later(message, deadline_s)
        deadline: _Deadline = asked.penstock_deadline  # type: ignore[attr-defined]
        while (left := deadline.at + LATE_S - time.monotonic()) > 0 and not asked.done():
            wait_for([asked], left)
        return answer_to(asked, 0.0)

    def ask_later(
        self, message: Message, deadline_s: float, again: bool = True, patient: bool = False
    ) -> Future[Message]:
        """As `ask`, answered through a future. Without ``again`` it is sent once: for answers so large that a second
        would stand in the way of the first. ``patient``: less and less often, for what is large itself and may wait
        long for its answer; a broker that does not know this actor is told it again at once, as all that waits."""
        now = time.monotonic()
        request_id = next(self._ids)
        frames = wire.encode(to_envelope(message, id=request_id))
        pause = RESEND_S + sum(map(len, frames)) / SLOW_LINE if again else deadline_s
        request = _Request(
            frames, type(message).__name__, Future(), _Deadline(now + deadline_s), now + pause, pause,
            max(MOST_RESEND_S, pause) if patient else pause,
        )  # fmt: skip
        request.future.set_running_or_notify_cancel()
        request.future.penstock_id = request_id  # type: ignore[attr-defined]
        request.future.penstock_deadline = request.deadline  # type: ignore[attr-defined]
        self._send(request)
        return request.future

    def tell(self, message: Message) -> None:
        """Sends ``message`` and expects no answer."""
        self._send(wire.encode(to_envelope(message)))

    def post(self, event: object) -> None:
        """Puts something of the actor's own into its inbox."""
        self.inbox.put(event)

    @property
    def unheard(self) -> str:
        """Why nothing may have come from there yet, in words; empty: something has."""
        elsewhere = "is it another machine's loopback, or " * is_loopback(self.address)
        why = f"has answered nothing so far: {elsewhere}are keys missing, wrong, or not wanted there?"
        return "" if self._heard else why

    def close(self, linger_s: float = LINGER_MS / 1000) -> None:
        """Sends what is queued, for so long where nobody takes it, then closes."""
        self._linger_ms = int(1000 * linger_s)
        self._closing.set()
        self._wake()
        self._thread.join(linger_s + 1)

    def _send(self, item: _Request | list[bytes | memoryview]) -> None:
        if self.fenced:
            raise self.fenced
        if self._closing.is_set():
            raise DeadlineError(f"nothing can be said any more: {self._ended}")
        self._outgoing.put(item)
        self._wake()

    def _wake(self) -> None:
        try:
            self._wake_write.send(b"\0")
        except (BlockingIOError, OSError):
            pass  # already awake, or closed

    def _run(self) -> None:
        context, poller = zmq.Context(), zmq.Poller()
        line: Connection | None = None
        beats: Connection | None = None
        poller.register(self._wake_read.fileno(), zmq.POLLIN)
        waiting: dict[int, _Request] = {}
        beat_at = time.monotonic() + self.beat_s
        since, pause, unknown = 0.0, 0.0, False
        try:
            line = Connection(context, poller, self.address, self.identity, self._keys)
            while True:
                now = time.monotonic()
                ready = dict(poller.poll(int(max(10, min(200, (beat_at - now) * 1000)))))
                if beats:
                    beats.look()
                if line.look():
                    now = time.monotonic()
                    pause = min(MOST_REHELLO_S, max(REHELLO_S, 2 * pause)) if now - since < LASTING_S else 0.0
                    since, self._hello_next, unknown = now, now + pause, True
                if unknown and time.monotonic() >= self._hello_next:
                    unknown = False
                    self._greet(line, waiting)
                if self._wake_read.fileno() in ready:
                    self._wake_read.recv(4096)
                self._transmit(line, waiting)
                while self._receive(line, line, waiting):
                    pass
                while beats and self._receive(beats, line, waiting):
                    pass
                now = time.monotonic()
                self._overdue(line, waiting, now)
                if now >= beat_at:
                    beat_at = now + self.beat_s
                    if self.beat and not beats:
                        beats = Connection(context, poller, self.address, self.identity + BESIDE, self._keys)
                    if beats:
                        self._tell_beat(beats)
                if self._closing.is_set() and self._outgoing.empty():
                    break
        except Exception as error:  # nobody is left to answer: whoever says something more hears why
            log.exception("the mailbox failed")
            self._ended = f"the mailbox failed: {type(error).__name__}: {error}"
            self.inbox.put(DeadlineError(self._ended))
        finally:
            self._closing.set()
            while not self._outgoing.empty():
                item = self._outgoing.get_nowait()
                if isinstance(item, _Request):
                    waiting[item.future.penstock_id] = item  # type: ignore[attr-defined]
            for request in waiting.values():
                request.future.set_exception(DeadlineError(f"{request.what}: {self._ended}"))
            for each in (line, beats):
                if each:
                    each.close(self._linger_ms)
            context.term()
            self._wake_read.close()
            self._wake_write.close()

    def _tell_beat(self, line: Connection) -> None:
        if self.beat is None:
            return
        try:
            frames = wire.encode(to_envelope(self.beat()))
        except Exception:  # answers need this thread, and the next heartbeat may be sound
            log.warning("a heartbeat could not be made", exc_info=True)
            return
        line.send(frames)

    def _transmit(self, line: Connection, waiting: dict[int, _Request]) -> None:
        while True:
            try:
                item = self._outgoing.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, _Request):
                waiting[item.future.penstock_id] = item  # type: ignore[attr-defined]
                line.send(item.frames)
            else:
                line.send(item)

    def _receive(self, source: Connection, line: Connection, waiting: dict[int, _Request]) -> bool:
        parts = source.receive()
        if parts is None:
            return False
        self.heard_at, self._heard = time.monotonic(), True
        try:
            envelope = wire.decode([part.buffer for part in parts])
            message = from_envelope(envelope)
        except wire.ProtocolError as error:  # nothing it says can be understood: better now than at the deadline
            log.error("the broker is of another version", error=str(error))
            for request in waiting.values():
                request.future.set_exception(error)
            waiting.clear()
            return True
        except Exception as error:
            log.warning("a message from the broker was refused", error=str(error))
            return True
        if isinstance(message, HeartbeatAck):
            return True
        if isinstance(message, Waits):
            for request in waiting.values() if self.waits_along else ():
                request.deadline.at = max(request.deadline.at, self.heard_at + WAITS_S)
            return True
        if isinstance(message, Fenced):
            self.fenced = FencedError(f"{self.identity} was replaced by {message.by}")
            for request in waiting.values():
                request.future.set_exception(self.fenced)
            waiting.clear()
            self.inbox.put(self.fenced)
        elif isinstance(message, HelloNeeded):
            if self.hello:
                self._greet(line, waiting)
        elif envelope.reply_to:
            answered = waiting.pop(envelope.reply_to, None)
            if answered and isinstance(message, Refused):
                answered.future.set_exception(RefusedError(message))
            elif answered:
                answered.future.set_result(message)
        elif isinstance(message, Welcome):
            self._hello_next = 0.0
        elif not isinstance(message, Resumed):  # answers to an introduction that nobody waits for
            if self.arrived:
                self.arrived(message)
            try:
                self.handlers.get(type(message), self.inbox.put)(message)
            except Exception:  # heartbeats and answers need this thread
                log.exception("a message could not be handled", type=type(message).__name__)
        return True

    def _greet(self, line: Connection, waiting: dict[int, _Request]) -> None:
        """To a broker that does not know this actor, or by a line that is new: what either has said by the one before
        may be lost. All that waits is said again."""
        now = time.monotonic()
        if now < self._hello_next:
            return
        if self.hello:
            behind = sum(len(frame) for request in waiting.values() for frame in request.frames)
            self._hello_next = now + min(MOST_REHELLO_S, REHELLO_S + behind / SLOW_LINE)
            for introduction in self.hello():
                line.send(wire.encode(to_envelope(introduction)))
            self.inbox.put(HelloNeeded())
        for request in waiting.values():
            request.resend_at = now

    def _overdue(self, line: Connection, waiting: dict[int, _Request], now: float) -> None:
        never = f"; it {self.unheard}" if self.unheard else ""
        for request_id, request in list(waiting.items()):
            if now >= request.deadline.at:
                del waiting[request_id]
                late = f"{request.what}: no answer from {self.address} in time{never}"
                request.future.set_exception(DeadlineError(late))
            elif now >= request.resend_at:
                request.pause_s = min(2 * request.pause_s, request.most_pause_s)
                request.resend_at = now + request.pause_s
                line.send(request.frames)
