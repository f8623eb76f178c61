"""The gateway's ZeroMQ door, for `penstock.AgentClient`."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import OrderedDict
from typing import Any, TypeVar

import numpy as np
import structlog
from pydantic import BaseModel, ValidationError

from penstock.protocols import messages as m
from penstock.protocols.agent_line import BEAT_S
from penstock.protocols.experience import as_bytes
from penstock.protocols.keys import BrokerKeys
from penstock.protocols.router_server import RouterServer
from penstock.services.gateway.access import OWNER, WHO, Access, Visitor
from penstock.services.gateway.bodies import HELD, LARGEST_SHOWN
from penstock.services.gateway.chat import ChatRequest
from penstock.services.gateway.desk import Desk
from penstock.services.gateway.errors import LEAVING, AgentError, what_is_wrong
from penstock.services.gateway.fruitless import PEER
from penstock.services.gateway.http import Tokens
from penstock.services.gateway.questions import Asking
from penstock.services.gateway.session import Turn

log = structlog.get_logger()

POLL_S = 0.005
SILENT_S = 3 * BEAT_S
"""A client of which nothing was heard for so long is given no session: it has gone, most probably."""
REMEMBERED, REMEMBERED_BYTES = 4096, 256 << 20
"""Answers that are kept for who asks again; and their bytes."""
Request = tuple[str, int, str]
"""Who asked, by which number, and with which guest's key: asked again, it is the same."""
Asked = TypeVar("Asked", bound=BaseModel)


class ZmqDoor:
    """A thread with the socket; what is asked is answered in the desk's loop."""

    def __init__(self, bind: str, desk: Desk, keys: BrokerKeys | None, access: Access) -> None:
        self._desk, self._access = desk, access
        self._router = RouterServer(bind, keys, "gateway.bind", access.admits, LARGEST_SHOWN)
        self.address = self._router.address
        self._answers: queue.SimpleQueue[tuple[Request, m.Message]] = queue.SimpleQueue()
        self._known: OrderedDict[Request, m.Message | None] = OrderedDict()
        self._known_bytes = 0
        self._heard_at: OrderedDict[str, float] = OrderedDict()
        """By identity: clients that have said something, and when, the last of them last."""
        self._closing = threading.Event()
        self._base_url = ""
        self._thread: threading.Thread | None = None

    def start(self, loop: asyncio.AbstractEventLoop, base_url: str) -> None:
        """Answers agents from now on."""
        self._base_url = base_url
        self._thread = threading.Thread(target=self._run, args=(loop,), name="zmq-door", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Its thread is at work."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Says what is there to say, and closes."""
        self._closing.set()
        if self._thread:
            self._thread.join(5)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._closing.is_set():
            for identity, number, message in self._router.receive(POLL_S):
                self._note_heard(identity)
                guest = self._router.guests.get(identity, "")
                request = identity, number, guest
                if isinstance(message, m.AgentBeat):
                    loop.call_soon_threadsafe(self._heard, message.sessions, guest)
                    continue
                if request not in self._known:
                    self._remember(request, None)
                    asyncio.run_coroutine_threadsafe(self._answer(request, message), loop)
                elif (answer := self._known[request]) is not None:
                    self._send(request, answer)
            while not self._answers.empty():
                request, answer = self._answers.get()
                self._remember(request, answer)
                self._send(request, answer)
            self._router.flush()
        self._router.close()

    def _note_heard(self, identity: str) -> None:
        now = time.monotonic()
        self._heard_at[identity] = now
        self._heard_at.move_to_end(identity)
        while next(iter(self._heard_at.values())) < now - SILENT_S:
            self._heard_at.popitem(last=False)

    def _send(self, request: Request, answer: m.Message) -> None:
        identity, number, _ = request
        try:
            self._router.send(identity, answer, number)
        except Exception as error:  # what the policy said has no bytes, say; it costs its agent alone
            log.exception("an answer cannot be sent", type=type(answer).__name__)
            reason = f"the answer cannot be sent: {type(error).__name__}"
            self._router.send(identity, m.AgentRefused(status=500, code="failed", reason=reason), number)

    def _remember(self, request: Request, answer: m.Message | None) -> None:
        self._known[request] = answer
        self._known_bytes += _bytes_of(answer)
        while len(self._known) > REMEMBERED or (self._known_bytes > REMEMBERED_BYTES and len(self._known) > 1):
            self._known_bytes -= _bytes_of(self._known.popitem(last=False)[1])

    def _who(self, guest: str) -> Visitor:
        return self._access.by_curve(guest) if guest else OWNER

    def _heard(self, sessions: list[str], guest: str) -> None:
        try:
            WHO.set(self._who(guest))
        except AgentError:  # his key was taken away: nobody is alive there
            return
        self._desk.heard(sessions)

    async def _answer(self, request: Request, message: m.Message) -> None:
        try:
            WHO.set(self._who(request[2]))
            PEER.set(f"zmq {request[0]}")
            answer = await self._do(message, request[0])
        except AgentError as error:
            if error.code == LEAVING:  # not heard, it is asked of the next one
                return
            answer = m.AgentRefused(
                status=error.status, code=error.code, reason=str(error), retry_s=error.retry_s or 0.0
            )
        except Exception as error:  # whatever an agent sends, it costs only itself
            log.exception("a request failed", type=type(message).__name__)
            answer = m.AgentRefused(status=500, code="failed", reason=f"{type(error).__name__}: {error}")
        self._answers.put((request, answer))

    async def _do(self, message: m.Message, identity: str) -> m.Message:
        desk = self._desk
        if isinstance(message, m.AgentOpen):
            return await self._open(message.wait_s, identity)
        if isinstance(message, m.AgentChat | m.AgentGenerate):
            who = WHO.get()
            who.check_turns()  # before anybody takes the time to read what is refused
            with who.holds(_size_of(message), HELD):
                return await self._turn(message)
        if isinstance(message, m.AgentReward):
            await desk.reward(message.session, message.reward, message.turn)
            return m.Ack()
        if isinstance(message, m.AgentFinish):
            how = message.metrics, message.turn_rewards, message.truncated, message.branches
            await desk.finish(message.session, message.reward, *how)
            return m.Ack()
        if isinstance(message, m.AgentAbandon):
            await desk.abandon(await desk.find(message.session), message.reason)
            return m.Ack()
        raise AgentError(400, "unexpected", f"{type(message).__name__} is not for an agent to say")

    async def _turn(self, message: m.AgentChat | m.AgentGenerate) -> m.AgentReply:
        asked = Asking(key=message.request)
        if isinstance(message, m.AgentGenerate):
            tokens = np.frombuffer(message.tokens.tobytes(), np.int32)
            _read(Tokens, {"tokens": tokens.tolist(), "max_tokens": message.max_tokens})
            held = await self._desk.find(message.session)
            return _reply(await self._desk.generate(held, tokens, message.max_tokens, asked=asked))
        asked_for = {"messages", "tools", "chat_template_kwargs", "max_tokens", "stop"}
        chat = _read(ChatRequest, message.model_dump(include=asked_for))
        held = await self._desk.find(message.session)
        return _reply(await self._desk.chat(held, chat.talk, chat.most, chat.stops, asked))

    async def _open(self, wait_s: float, identity: str) -> m.AgentOpened:
        held = await self._desk.open(wait_s, beats=True)
        if self._heard_at.get(identity, float("-inf")) < time.monotonic() - SILENT_S:
            await self._desk.untaken(held)
            raise AgentError(503, "no_session", "nothing was heard of who asked for a session; ask again", 1.0)
        lease, url, turn_s = held.work.lease, f"{self._base_url}/s/{held.id}/v1", self._desk.config.turn_s
        return m.AgentOpened(session=held.id, base_url=url, purpose=lease.purpose, task=lease.prompt, turn_s=turn_s)


def _size_of(asked: Any) -> int:
    """About so many bytes of what is asked, which may be large by its texts and pictures, or by how much there is."""
    if isinstance(asked, m.AgentGenerate):
        return len(asked.tokens)
    if isinstance(asked, m.AgentChat):
        return _size_of([asked.messages, asked.tools, asked.chat_template_kwargs, asked.stop])
    if isinstance(asked, dict):
        return sum(map(_size_of, (*asked, *asked.values())))
    return sum(map(_size_of, asked)) if isinstance(asked, list) else len(asked) if isinstance(asked, str | bytes) else 8


def _bytes_of(answer: m.Message | None) -> int:
    """Of what may be large: pictures of a task, and what the policy said."""
    if isinstance(answer, m.AgentReply):
        return len(answer.tokens) + len(answer.logprobs) + len(answer.versions) + len(str(answer.message))
    return sum(map(len, answer.task.pictures)) if isinstance(answer, m.AgentOpened) else 0


def _read(kind: type[Asked], said: dict[str, Any]) -> Asked:
    """What is asked, looked at as at the HTTP door. Raises `AgentError`."""
    try:
        return kind.model_validate(said)
    except ValidationError as error:
        raise AgentError(422, "invalid_request", what_is_wrong(error.errors())) from None


def _reply(turn: Turn) -> m.AgentReply:
    answer = turn.answer
    tokens, logprobs, versions = (
        as_bytes(values.tobytes()) for values in (answer.tokens, answer.logprobs, answer.versions)
    )
    return m.AgentReply(
        turn=turn.number, message=turn.message, finish=answer.finish, tokens=tokens, logprobs=logprobs,
        versions=versions, engine_s=answer.engine_s,
    )  # fmt: skip
