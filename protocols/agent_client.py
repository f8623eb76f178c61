"""An agent's side of the gateway, over ZeroMQ: `penstock.AgentClient`. Imports no torch.

>>> with AgentClient("runs/my-run") as client:                      # doctest: +SKIP
...     with client.session() as session:
...         reply = session.chat([{"role": "user", "content": session.task.text}])
...         session.finish(reward=float(reply.text == session.task.truth))
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from penstock.protocols import messages as m
from penstock.protocols.agent_line import (
    AgentRefusedError,
    Line,
    RunOver,
    Search,
    answered,
    checked,
    loaded,
    settled,
)
from penstock.protocols.experience import Branches, Finish, Prompt, Purpose, as_bytes
from penstock.protocols.keys import ClientKeys
from penstock.protocols.mailbox import LATE_S, DeadlineError, answer_to

__all__ = [
    "AgentClient", "AgentRefusedError", "AgentSession", "AsyncAgentClient", "AsyncAgentSession", "Reply", "RunOver",
]  # fmt: skip

TURN_S = 600.0
"""For the policy's answer, or as long as the gateway gives it where that is longer."""
SAY_S = 120.0
OPEN_S = 20.0
GRACE_S = 10.0
"""What an answer may be late by, beyond what the gateway was told to wait."""
OPENED_S = OPEN_S + GRACE_S + LATE_S
"""By then it is known whether there is a session."""
START_LOOK_S = 0.2
"""Between two looks at whether a run is under way."""


@dataclass(frozen=True)
class Reply:
    """What the policy said in one turn."""

    turn: int
    message: dict[str, Any]
    """As chat completions have it; put it into the next request as it is."""
    finish: Finish
    tokens: np.ndarray
    """int32 ``[tokens]``: exactly these are trained on."""
    logprobs: np.ndarray
    """float32 ``[tokens]``"""
    versions: np.ndarray
    """int32 ``[tokens]``: the version of the policy that sampled each."""
    engine_s: float
    """Seconds that the rollout's engine had the turn; what an agent waited beyond them was on the way."""

    @property
    def text(self) -> str:
        """What it said, less the calls in it."""
        return self.message["content"]

    @property
    def calls(self) -> list[tuple[str, dict[str, Any], str]]:
        """The tools that it asks for: name, arguments, and the id that the result must carry."""
        found = [(call["function"], call["id"]) for call in self.message.get("tool_calls", ())]
        return [(function["name"], json.loads(function["arguments"]), id) for function, id in found]


def _reply(message: m.AgentReply) -> Reply:
    tokens, logprobs, versions = (
        np.frombuffer(getattr(message, name).tobytes(), kind)
        for name, kind in (("tokens", np.int32), ("logprobs", np.float32), ("versions", np.int32))
    )
    return Reply(message.turn, message.message, message.finish, tokens, logprobs, versions, message.engine_s)


class _Asked:
    """A session's messages, the same for both clients."""

    def __init__(self, line: Line, opened: m.AgentOpened) -> None:
        self._line, self.id = line, opened.session
        self.task: Prompt = opened.task
        """What the run asks."""
        self.purpose: Purpose = opened.purpose
        """``eval``: it is measured, and never trained on."""
        self.base_url = opened.base_url
        """For what speaks OpenAI's or Anthropic's API: `OpenAI(base_url=session.base_url, api_key="any")`."""
        self.ended = False
        self._turn_s = max(TURN_S, opened.turn_s + GRACE_S)
        self._heard: int | None = None
        """The turn that was answered last, to whoever asks here."""
        line.take(self.id)
        weakref.finalize(self, line.sessions.discard, self.id)  # dropped, nobody can end it: another is to have it

    def forget(self) -> None:
        """It is not said any more that somebody has this session: for one that the gateway knows no more."""
        self.ended = True
        self._line.sessions.discard(self.id)

    def _chat(
        self, messages: Any, tools: Any, max_tokens: int | None, stop: Sequence[str], template: Mapping[str, Any] | None
    ) -> m.AgentChat:
        return m.AgentChat(
            session=self.id, request=self._line.request(), messages=[_sent(message) for message in messages],
            tools=None if tools is None else [dict(tool) for tool in tools], max_tokens=max_tokens, stop=list(stop),
            chat_template_kwargs=None if template is None else dict(template),
        )  # fmt: skip

    def _generate(self, tokens: Sequence[int] | np.ndarray, max_tokens: int | None) -> m.AgentGenerate:
        given = as_bytes(np.asarray(tokens, np.int32).tobytes())
        return m.AgentGenerate(session=self.id, request=self._line.request(), tokens=given, max_tokens=max_tokens)

    def _answered(self, found: m.AgentReply) -> Reply:
        reply = _reply(found)
        self._heard = reply.turn
        return reply

    def _worth(self, reward: float, turn: int | str | None) -> m.AgentReward:
        """After a takeover the gateway does not know which answers were heard: it is told."""
        return m.AgentReward(session=self.id, reward=reward, turn=self._heard if turn is None else turn)

    def _left_by(self, error: BaseException | None) -> str:
        """Why it is to be given to another agent, where its block was left so; empty: it is not, or nobody is there
        who could be told."""
        if isinstance(error, DeadlineError) or (isinstance(error, AgentRefusedError) and error.lost):
            self.forget()
        if self.ended:
            return ""
        return f"{type(error).__name__}: {error}" if error else "left without finish()"

    def _finish(
        self,
        reward: float | None,
        metrics: Mapping[str, float] | None,
        turn_rewards: Mapping[int | str, float] | None,
        truncated: bool,
        branches: Branches,
    ) -> m.AgentFinish:
        by_name = {str(turn): value for turn, value in (turn_rewards or {}).items()}
        measured = dict(metrics or {})
        return m.AgentFinish(
            session=self.id, reward=reward, metrics=measured, turn_rewards=by_name, truncated=truncated,
            branches=branches,
        )  # fmt: skip


class AgentSession(_Asked):
    """One task in an agent's hands. Left without `finish`, it is given to another agent."""

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Reply:
        """The policy's answer to a conversation; ``chat_template_kwargs``: what the chat template is told beside the
        messages, e.g. ``{"enable_thinking": False}``, over what the run and the task say. Raises `AgentRefusedError`
        or `DeadlineError`."""
        asked = self._chat(messages, tools, max_tokens, stop, chat_template_kwargs)
        return self._answered(self._line.say(asked, self._turn_s))

    def generate(self, tokens: Sequence[int] | np.ndarray, max_tokens: int | None = None) -> Reply:
        """The policy's answer to token ids."""
        return self._answered(self._line.say(self._generate(tokens, max_tokens), self._turn_s))

    def reward(self, reward: float, turn: int | str | None = None) -> None:
        """What one turn was worth: ``turn`` is a `Reply.turn`, or the id of the completion, response or message that
        told it; None: the newest answer. Said again, it replaces what was said."""
        self._line.say(self._worth(reward, turn), SAY_S)

    def finish(
        self,
        reward: float | None = None,
        metrics: Mapping[str, float] | None = None,
        turn_rewards: Mapping[int | str, float] | None = None,
        truncated: bool = False,
        branches: Branches = "shared",
    ) -> None:
        """Done. ``reward`` says how good it was, beside what its turns were worth: ``turn_rewards`` as by `reward`.
        Without any of them the run's reward functions say it. The mean of each of ``metrics`` is in the step's metrics,
        as ``agent/NAME``. ``truncated``: it was cut off, for want of room or of turns.
        ``branches`` ``own``: each branch is an answer of its own, as of one player of several, worth ``reward`` and
        what its own turns were."""
        self._line.say(self._finish(reward, metrics, turn_rewards, truncated, branches), SAY_S)
        self.forget()

    def abandon(self, reason: str = "given up by its agent") -> None:
        """Another agent may try, from the start."""
        self.forget()
        self._line.say(m.AgentAbandon(session=self.id, reason=reason[:1000]), SAY_S)

    def __enter__(self) -> AgentSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if reason := self._left_by(error):
            self.abandon(reason)


class AgentClient:
    """``gateway``: the folder of a run, or a gateway's address, ``tcp://host:port``; then, beyond the loopback, with
    ``keys``: the file that ``penstock keys add`` has written. Raises `KeysError` where it is none, `AddressError` where
    the address is, `RunOver` where the run has ended."""

    def __init__(self, gateway: str | Path, keys: ClientKeys | str | Path | None = None) -> None:
        search = Search(gateway, loaded(keys))
        while (line := search.look()) is None:
            time.sleep(START_LOOK_S)
        self._line = line

    def session(self, wait_s: float = 60.0) -> AgentSession:
        """The next task that no agent has. Raises `RunOver`, or `AgentRefusedError` where none is free for so long."""
        deadline = time.monotonic() + wait_s
        while (opened := _opened(self._line, settled(_open(self._line, deadline), OPENED_S), deadline)) is None:
            pass
        return AgentSession(self._line, opened)

    def close(self) -> None:
        """Hangs up."""
        self._line.close()

    def __enter__(self) -> AgentClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(line: Line, deadline: float) -> Future[m.Message]:
    """Asks for a session. The gateway waits for one, but not longer than a line should be silent."""
    wait_s = min(max(0.0, deadline - time.monotonic()), OPEN_S)
    return line.ask(m.AgentOpen(wait_s=line.patience(wait_s)), wait_s + GRACE_S)


def _opened(line: Line, asked: Future[m.Message], deadline: float) -> m.AgentOpened | None:
    """The session; None where it is to be asked for again."""
    try:
        found = answer_to(asked, 0.0)
    except DeadlineError:
        line.check_over()
        if time.monotonic() < deadline:
            return None
        raise
    if isinstance(found, m.AgentRefused) and found.code == "no_session" and time.monotonic() < deadline:
        return None
    return checked(found)


class AsyncAgentSession(_Asked):
    """As `AgentSession`, for asyncio."""

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Reply:
        """See `AgentSession.chat`."""
        asked = self._chat(messages, tools, max_tokens, stop, chat_template_kwargs)
        return self._answered(await self._line.say_async(asked, self._turn_s))

    async def generate(self, tokens: Sequence[int] | np.ndarray, max_tokens: int | None = None) -> Reply:
        """See `AgentSession.generate`."""
        return self._answered(await self._line.say_async(self._generate(tokens, max_tokens), self._turn_s))

    async def reward(self, reward: float, turn: int | str | None = None) -> None:
        """See `AgentSession.reward`."""
        await self._line.say_async(self._worth(reward, turn), SAY_S)

    async def finish(
        self,
        reward: float | None = None,
        metrics: Mapping[str, float] | None = None,
        turn_rewards: Mapping[int | str, float] | None = None,
        truncated: bool = False,
        branches: Branches = "shared",
    ) -> None:
        """See `AgentSession.finish`."""
        await self._line.say_async(self._finish(reward, metrics, turn_rewards, truncated, branches), SAY_S)
        self.forget()

    async def abandon(self, reason: str = "given up by its agent") -> None:
        """See `AgentSession.abandon`."""
        self.forget()
        await self._line.say_async(m.AgentAbandon(session=self.id, reason=reason[:1000]), SAY_S)

    async def __aenter__(self) -> AsyncAgentSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if reason := self._left_by(error):
            await self.abandon(reason)


class AsyncAgentClient:
    """As `AgentClient`, for asyncio; the run is looked for where it is entered: ``async with``."""

    def __init__(self, gateway: str | Path, keys: ClientKeys | str | Path | None = None) -> None:
        self._gateway, self._keys = gateway, loaded(keys)

    async def session(self, wait_s: float = 60.0) -> AsyncAgentSession:
        """See `AgentClient.session`."""
        deadline = time.monotonic() + wait_s
        while (opened := _opened(self._line, await answered(_open(self._line, deadline), OPENED_S), deadline)) is None:
            pass
        return AsyncAgentSession(self._line, opened)

    async def __aenter__(self) -> AsyncAgentClient:
        search = Search(self._gateway, self._keys)
        while (line := search.look()) is None:
            await asyncio.sleep(START_LOOK_S)
        self._line = line
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._line.close)


def _sent(message: Mapping[str, Any]) -> dict[str, Any]:
    """With the files of the pictures that it shows."""
    content = message.get("content")
    return {**message, "content": list(map(_part, content))} if isinstance(content, list | tuple) else dict(message)


def _part(part: Any) -> Any:
    image: Any = part.get("image") if isinstance(part, Mapping) else None
    if isinstance(image, os.PathLike):
        return {**part, "image": Path(image).read_bytes()}
    if hasattr(image, "save"):  # Pillow's
        file = io.BytesIO()
        image.convert("RGB").save(file, "PNG")
        return {**part, "image": file.getvalue()}
    return part
