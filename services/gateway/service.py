"""The gateway actor: groups in, sessions to agents over HTTP and ZeroMQ, finished groups out."""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import structlog

from penstock.protocols.experience import Group
from penstock.protocols.messages import GiveBack, HelloNeeded, Lease, Message, Stop, TurnRequest
from penstock.services.gateway.config import GatewayConfig
from penstock.services.gateway.desk import Desk
from penstock.services.gateway.doors import Doors
from penstock.services.gateway.work import Key
from penstock.services.modeling.lengths import longest_sequence, positions_of
from penstock.services.modeling.load import load_config
from penstock.services.runtime import health
from penstock.services.runtime.actor import Actor, ActorContext
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.outbox import Answered, Outbox, answer_of, key_of
from penstock.services.turns.tokenizer import Tokenizer

log = structlog.get_logger()

LINGER_S = 2.0
"""After the end: whoever asks is told that the run is over."""
GIVE_BACK_S = 30.0
LOOK_S = 1.0
"""Between two looks at sessions of silent agents."""


class Gateway:
    """One gateway process. `run` returns the reason it ended for."""

    def __init__(
        self,
        context: ActorContext,
        config: GatewayConfig,
        model: str,
        max_length: int | None,
        group_size: int,
        reads: Callable[[str], bool],
        template: Mapping[str, Any],
    ) -> None:
        if config.sessions < group_size:
            raise SetupError(f"gateway.sessions={config.sessions} has no room for a group of {group_size}")
        self.actor = Actor("gateway", context)
        self._group_size, self._most = group_size, config.sessions // group_size
        self._level = self._most
        """Groups that it takes at once. At first all that it has room for: some may have sessions that agents still
        speak of. Those that no agent is at are given back, and then it is as many as agents ask for."""
        self._outbox = Outbox(self.actor, lambda: self._level)
        text = Tokenizer(context.model_path, template)
        if config.pictures:
            _ = text.pictures  # what it lacks is said now, and no agent waits until it is loaded
        self._loop = asyncio.new_event_loop()
        self._desk = Desk(
            config, text, max_length, self._say, self._deliver, self._gone, reads,
            lambda openers: self.actor.mailbox.post(_Wanted(openers)), self._give_back,
        )  # fmt: skip
        self._doors = Doors(config, context, self._desk, model)
        self._alone = False
        self._thread = threading.Thread(target=self._serve, name="doors", daemon=True)

    def run(self) -> str:
        """Serves agents until it is told to stop."""
        self._doors.open(self._loop)
        self._thread.start()
        self.actor.measure = self._desk.gauges
        self.actor.join()
        self._outbox.joined()
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
            if not self._doors.zmq_alive:
                raise RuntimeError("the gateway's ZeroMQ door has ended by itself")
        self._loop.call_soon_threadsafe(self._desk.end, reason, self._alone)
        self._outbox.drain(self._read_inbox, LINGER_S)
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
            self._alone = event is self.actor.own_stop
            return event.reason
        if isinstance(event, Exception):  # fenced by the broker, or the mailbox has failed
            raise event
        if isinstance(event, Lease):
            self._loop.call_soon_threadsafe(self._start, event)
        elif isinstance(event, Answered):
            self._outbox.answered(event)
        elif isinstance(event, HelloNeeded):
            self._outbox.forgotten()
        elif isinstance(event, _Closed):
            self._outbox.dismiss()
        elif isinstance(event, _Wanted):
            needed = len(self.actor.held) + math.ceil(event.openers / self._group_size)
            self._level = max(self._level, min(needed, self._most))
            self._outbox.give_credit()
        elif isinstance(event, _GaveBack):
            self._level -= 1
            self._outbox.dismiss()
        elif isinstance(event, Message):
            log.warning("unexpected message", type=type(event).__name__)
        return None

    def _start(self, lease: Lease) -> None:
        """In the doors' loop."""
        if self._desk.has(lease) or key_of(lease) in self._outbox:
            self.actor.mailbox.post(_Closed())  # leased to us again while we still hold it: one answer will do
        else:
            self._desk.start(lease)

    def _gone(self, key: Key) -> None:
        """In the doors' loop: another gateway has the group."""
        self.actor.put_down(*key)
        self.actor.mailbox.post(_Closed())

    def _give_back(self, key: Key) -> None:
        """In the doors' loop: no agent is here for the group. Where the broker does not hear it, the lease runs out."""
        self.actor.put_down(*key)
        self.actor.mailbox.ask_later(GiveBack(purpose=key[0], number=key[1]), GIVE_BACK_S)
        self.actor.mailbox.post(_GaveBack())

    def _say(self, message: Message, deadline_s: float) -> Future[Message]:
        """To the broker. A turn brings its whole prompt, and waits as long as a rollout needs for it."""
        return self.actor.mailbox.ask_later(message, deadline_s, patient=isinstance(message, TurnRequest))

    def _deliver(self, lease: Lease, made: Group | str) -> None:
        """In the doors' loop."""
        self._outbox.say(answer_of(lease, made))


class _Closed:
    """A group that was leased needs no answer of ours."""


class _GaveBack:
    """A group is for another gateway, and nobody here needs one in its place."""


@dataclass(frozen=True)
class _Wanted:
    """So many agents wait for a session."""

    openers: int


def make(context: ActorContext, config: Any, kind: str) -> Gateway:
    """The actor, for a run's whole config."""
    said = [config.columns.by_name[f.column] for f in config.reward.functions if f.function == "environment"]
    return Gateway(
        context,
        config.gateway,
        context.run,
        longest_sequence(config.rollout.engine, positions_of(load_config(context.model_path))),
        config.sampling.trajectories,
        lambda source: any(column.asked(source) for column in said),
        config.template,
    )
