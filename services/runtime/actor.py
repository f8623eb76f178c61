"""The life every actor shares: join the broker, beat, drain, stop."""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import structlog

from penstock.protocols.keys import ClientKeys
from penstock.protocols.mailbox import FencedError, Mailbox, incarnation_of
from penstock.protocols.messages import Bye, Generate, Heartbeat, Hello, Holding, Lease, Message, Stop, Welcome, Work
from penstock.protocols.messages.membership import Held
from penstock.services.runtime import health

log = structlog.get_logger()

JOIN_DEADLINE_S = 60.0
BROKER_SILENT_S = 60.0
"""An actor that has not heard from the broker for this long ends with an error."""
STOP_GRACE_S = 20.0


@dataclass(frozen=True)
class ActorContext:
    """Where an actor lives: its name, its run and its broker."""

    name: str
    run: str
    folder: Path
    """The run's folder."""
    broker: str
    """The broker's address, e.g. ``tcp://127.0.0.1:5555``."""
    threads: int = 1
    """Compute threads."""
    keys: ClientKeys | None = None
    """For a broker that is not on this machine's loopback."""
    model_path: str = ""
    """Where the model that training starts from lies: a folder, or a name on the hub."""
    run_key: str = ""
    """The run's own key, by which shared memory of this host is known to be this run's."""


def on_stop(stop: Callable[[str], None], supervised: bool = False, grace_s: float = STOP_GRACE_S) -> None:
    """Calls ``stop(reason)`` on SIGTERM, on SIGINT, and, for a supervised process, when its supervisor is gone
    (stdin closes). A process that then does not end within ``grace_s``, or `STOP_GRACE_S` where its supervisor is gone,
    is ended."""

    def leave(reason: str, within_s: float = grace_s) -> None:
        stop(reason)
        timer = threading.Timer(within_s, lambda: os._exit(75))
        timer.daemon = True
        timer.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: leave(signal.Signals(received).name))

    def lifeline() -> None:
        while os.read(0, 4096):  # not sys.stdin: its lock would be held when the interpreter ends
            pass
        leave("the supervisor is gone", STOP_GRACE_S)

    if supervised:
        threading.Thread(target=lifeline, name="lifeline", daemon=True).start()


def end(code: int) -> NoReturn:
    """Ends this process at once, once everything is closed. The interpreter's own end would abort it (SIGABRT)
    where a thread of ours is still inside a native library, such as a broadcast that waits for its deadline."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Actor:
    """A member of the pipeline.

    ``inbox`` of its mailbox receives what the broker sends, and a `Stop` when it is time to leave.
    """

    def __init__(self, kind: str, context: ActorContext) -> None:
        self.kind, self.context = kind, context
        self.mailbox = Mailbox(context.broker, incarnation_of(context.name), context.keys)
        self.mailbox.waits_along = True
        self.gauges: dict[str, float] = {}
        self.measure: Callable[[], dict[str, float]] = dict
        """Gauges that are read at each beat, in the mailbox's thread."""
        self.version = -1
        """The version of the weights that this actor serves; -1 for none."""
        self.digest = ""
        self.hellos = 0
        self.held: set[tuple[Held, int]] = set()
        """Groups and turns that it was given, in the inbox or at work, until `put_down`."""
        self.own_stop: Stop | None = None
        """Its process was told to leave, and not by the broker: the run may go on."""
        self.error: str | None = None
        """Why it ends, where that is not the run's end."""
        self.introduction: Callable[[], list[Message]] = list
        """What it says right after its hello, to a broker that has forgotten it."""
        self.mailbox.arrived = self._arrived
        self._busy_s = 0.0
        self._busy_since: float | None = None
        self._beat_at = time.monotonic()

    def join(self) -> Welcome:
        """Says hello. Raises `DeadlineError` where no broker answers."""
        welcome = self.mailbox.ask(self._hello(), JOIN_DEADLINE_S)
        assert isinstance(welcome, Welcome)
        self.mailbox.beat_s = welcome.heartbeat_s
        self.mailbox.hello = lambda: [self._hello(), *self.introduction()]
        self.mailbox.beat = self._beat
        log.info("joined", identity=self.mailbox.identity, broker=self.context.broker)
        return welcome

    def stop(self, reason: str) -> None:
        """Asks the actor's loop to end; safe from any thread and from a signal handler."""
        self.own_stop = Stop(reason=reason)
        self.mailbox.post(self.own_stop)

    def next(self, patience_s: float | None = None) -> object:
        """The next event of the inbox, however long that takes; None where it takes more than ``patience_s``."""
        while True:
            health.beat()
            try:
                return self.mailbox.inbox.get(timeout=health.EVERY_S if patience_s is None else patience_s)
            except queue.Empty:
                if patience_s is not None:
                    return None

    def leave(self, reason: str) -> None:
        """Says goodbye and closes the mailbox."""
        try:
            self.mailbox.tell(Bye(reason=reason))
        except FencedError:
            log.warning("fenced", reason=reason)
        self.mailbox.close()
        log.info("left", reason=reason)

    def put_down(self, purpose: Held, number: int) -> None:
        """It is done with this group."""
        self.held.discard((purpose, number))

    def set_busy(self, busy: bool) -> None:
        """Counts the time until this is said otherwise as work, or as idle."""
        now = time.monotonic()
        if busy and self._busy_since is None:
            self._busy_since = now
        elif not busy and self._busy_since is not None:
            self._busy_s += now - max(self._busy_since, self._beat_at)
            self._busy_since = None

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Counts the enclosed time as work; the rest is idle."""
        self.set_busy(True)
        try:
            yield
        finally:
            self.set_busy(False)

    def _holding(self) -> Holding:
        holding: Holding = {}
        for purpose, number in list(self.held):
            holding.setdefault(purpose, []).append(number)
        return holding

    def _arrived(self, message: Message) -> None:
        if isinstance(message, Lease):
            self.held.add((message.purpose, message.number))
        elif isinstance(message, Generate):
            self.held.add(("turn", message.id))
        elif isinstance(message, Work):
            self.held.update((item.purpose, item.number) for item in message.items)

    def _hello(self) -> Hello:
        self.hellos += 1
        return Hello(
            kind=self.kind,
            name=self.context.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=self.version,
            digest=self.digest,
            number=self.hellos,
            holding=self._holding(),
        )

    def _beat(self) -> Message:
        now = time.monotonic()
        away = now - self._beat_at - self.mailbox.beat_s
        if away > health.AWAY_S:  # this process was stopped: it heard nobody
            self.mailbox.heard_at = min(now, self.mailbox.heard_at + away)
        if now - self.mailbox.heard_at > BROKER_SILENT_S:
            log.error("the broker is silent", broker=self.context.broker, silent_s=round(now - self.mailbox.heard_at))
            self.error = f"the broker at {self.context.broker} was silent for {BROKER_SILENT_S:.0f} s"
            self.stop(self.error)
        busy, self._busy_s = self._busy_s, 0.0
        if since := self._busy_since:  # still at it: count the part inside this beat
            busy += now - max(since, self._beat_at)
        busy_share = min(1.0, busy / max(1e-3, now - self._beat_at))
        self._beat_at = now
        return Heartbeat(gauges={**self.gauges, **self.measure(), "busy": busy_share}, holding=self._holding())
