"""The gateway actor: groups in, sessions to agents over HTTP and ZeroMQ, finished groups out."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import structlog

from penstock.protocols.experience import Group, as_bytes, pack_group, summarize
from penstock.protocols.mailbox import DeadlineError, FencedError
from penstock.protocols.messages import Credit, Failed, Finished, HelloNeeded, Lease, Message, Stop
from penstock.services.gateway.config import GatewayConfig
from penstock.services.gateway.desk import Desk
from penstock.services.gateway.doors import Doors
from penstock.services.gateway.work import Key
from penstock.services.runtime import health
from penstock.services.runtime.actor import Actor, ActorContext
from penstock.services.runtime.errors import SetupError
from penstock.services.turns.tokenizer import Tokenizer

log = structlog.get_logger()

DURABLE_DEADLINE_S = 120.0
DRAIN_S = 10.0
LINGER_S = 2.0
LOOK_S = 1.0
"""Between two looks at sessions of silent agents."""


@dataclass(frozen=True)
class _Answered:
    """The broker's answer to a finished or failed group, posted to the inbox."""

    message: Finished | Failed
    error: BaseException | None


class Gateway:
    """One gateway process. `run` returns the reason it ended for."""

    def __init__(
        self,
        context: ActorContext,
        config: GatewayConfig,
        model: str,
        max_length: int | None,
        group_size: int,
        needs_reward: bool,
    ) -> None:
        if config.sessions < group_size:
            raise SetupError(f"gateway.sessions={config.sessions} has no room for a group of {group_size}")
        self.actor = Actor("gateway", context)
        self._limit = config.sessions // group_size
        self._outbox: set[tuple[str, int]] = set()
        self._closed = self._held_at_hello = 0
        self._credited, self._hello = -1, 0
        text = Tokenizer(context.model_path)
        self._loop = asyncio.new_event_loop()
        self._desk = Desk(
            config, text, max_length, self.actor.mailbox.ask_later, self._deliver, self._gone, needs_reward
        )
        self._doors = Doors(config, context, self._desk, model)
        self._thread = threading.Thread(target=self._serve, name="doors", daemon=True)

    def run(self) -> str:
        """Serves agents until it is told to stop."""
        self._doors.open(self._loop)
        self._thread.start()
        self.actor.measure = self._desk.gauges
        self.actor.join()
        self._hello = self.actor.hellos
        self._give_credit()
        reason: str | None = None
        looked_at = time.monotonic()
        while reason is None:
            health.beat()
            reason = self._read_inbox()
            if time.monotonic() - looked_at > LOOK_S:
                looked_at = time.monotonic()
                self._loop.call_soon_threadsafe(self._desk.expire)
            if not self._thread.is_alive():
                raise RuntimeError("the gateway's HTTP server has ended by itself")
        self._loop.call_soon_threadsafe(self._desk.end, reason)
        deadline = time.monotonic() + DRAIN_S
        until = time.monotonic() + LINGER_S  # whoever asks is told that the run is over
        while time.monotonic() < (deadline if self._outbox else until):
            self._read_inbox()
        self._doors.close()
        self._thread.join(5)
        self.actor.leave(reason)
        return reason

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._doors.serve())

    def _read_inbox(self) -> str | None:
        try:
            event = self.actor.mailbox.inbox.get(timeout=0.5)
        except queue.Empty:
            return None
        if isinstance(event, Stop):
            return event.reason
        if isinstance(event, FencedError):
            raise event
        if isinstance(event, Lease):
            self._loop.call_soon_threadsafe(self._start, event)
        elif isinstance(event, _Answered):
            self._answered(event)
        elif isinstance(event, HelloNeeded):  # the broker has forgotten us: our credit is void
            self._closed, self._credited, self._hello = 0, -1, self.actor.hellos
            self._held_at_hello = len(self.actor.held)
            self._give_credit()
        elif isinstance(event, _Closed):
            self._closed += 1
            self._give_credit()
        elif isinstance(event, Message):
            log.warning("unexpected message", type=type(event).__name__)
        return None

    def _start(self, lease: Lease) -> None:
        """In the doors' loop."""
        if self._desk.has(lease) or (lease.purpose, lease.number) in self._outbox:
            self.actor.mailbox.post(_Closed())  # leased to us again while we still hold it: one answer will do
        else:
            self._desk.start(lease)

    def _gone(self, key: Key) -> None:
        """In the doors' loop: another gateway has the group."""
        self.actor.put_down(*key)
        self.actor.mailbox.post(_Closed())

    def _deliver(self, lease: Lease, made: Group | str) -> None:
        """In the doors' loop: says it until the broker has called it durable."""
        self._outbox.add((lease.purpose, lease.number))
        about: dict[str, Any] = {"purpose": lease.purpose, "number": lease.number, "attempt": lease.attempt}
        if isinstance(made, str):
            log.warning("group failed", group=lease.number, error=made)
            self._send(Failed(**about, error=made[:340]))
        else:
            self._send(Finished(**about, summary=summarize(made), experience=as_bytes(pack_group(made))))

    def _send(self, message: Finished | Failed) -> None:
        def answered(future: Future[Message]) -> None:
            self.actor.mailbox.post(_Answered(message, future.exception()))

        self.actor.mailbox.ask_later(message, DURABLE_DEADLINE_S).add_done_callback(answered)

    def _answered(self, answer: _Answered) -> None:
        message = answer.message
        if isinstance(answer.error, DeadlineError):
            log.warning("not durable yet; sending again", group=message.number, error=str(answer.error))
            self._send(message)
            return
        self._outbox.discard((message.purpose, message.number))
        self.actor.put_down(message.purpose, message.number)
        self._closed += 1
        if answer.error:
            log.error("the broker refused a group", group=message.number, error=str(answer.error))
        self._give_credit()

    def _give_credit(self) -> None:
        total = self._limit - self._held_at_hello + self._closed
        if total > self._credited:
            self._credited = total
            self.actor.mailbox.tell(Credit(total=total, hello=self._hello))


class _Closed:
    """A group that was leased needs no answer of ours."""


def make(context: ActorContext, config: Any, kind: str) -> Gateway:
    """The actor, for a run's whole config."""
    functions = [function.function for function in config.reward.functions]
    return Gateway(
        context,
        config.gateway,
        context.run,
        getattr(config.rollout.engine, "max_length", None),
        config.sampling.trajectories,
        "environment" in functions,
    )
