"""Environments of the user's own: classes as ``rollout.environment`` names them, in processes of their own here too."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from penstock.protocols.agent_client import AsyncAgentSession, Reply
from penstock.protocols.measured import MOST, added, fault
from penstock.services.environments.begun import begun_with
from penstock.services.environments.config import EnvironmentConfig
from penstock.services.environments.past import MOST_LOST
from penstock.services.environments.pool import EnvironmentPool
from penstock.services.environments.sessions import LOST
from penstock.services.players.base import Played, PlayError, as_messages, in_parts, said_to
from penstock.services.turns.tool_calls import CLOSE, FORMS, OPEN, Form

log = structlog.get_logger()

ESCAPED = CLOSE.replace("/", r"\/")
"""In JSON."""


class LostError(PlayError):
    """Its worker died by another session's doing."""


class OwnPlayer:
    """``config`` as in a run's config. The pool's worker processes have its deadlines: a call that hangs costs its
    session."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config, self._pool, self._numbers = config, EnvironmentPool(config), itertools.count()
        self._form: Form = config.tools.form if config.tools else "hermes"
        self._in_words = config.tools is None or config.tools.tool_calls in FORMS
        """What it is told is not only calls."""

    async def open(self) -> None:
        """See `Player.open`."""

    async def play(self, session: AsyncAgentSession) -> Played:
        """See `Player.play`. Rewards are the turns'. Where it has to begin again, since its worker died by another's
        doing, it does in a conversation of its own."""
        for _ in range(MOST_LOST):
            number = next(self._numbers)
            try:
                return await self._play(session, number)
            except LostError:
                log.info("a session begins again: its worker died", session=session.id)
            finally:
                self._pool.end(number)
        raise PlayError("its worker died too often")

    async def _play(self, session: AsyncAgentSession, number: int) -> Played:
        begun = await _asked(lambda answered: self._pool.reset(number, session.task, answered))
        tools, rewards = begun["tools"] or session.task.tools, dict[int | str, float]()
        metrics: dict[str, float] = {}
        try:
            messages = as_messages(begun_with(session.task, begun))
        except ValueError as error:
            raise PlayError(str(error)) from error
        for turn in range(1, self._config.max_turns + 1):
            reply = await said_to(session, messages, tools)
            if reply is None:
                await self._settle(number, rewards)
                return Played(0.0, _measured(turn - 1, metrics), rewards, truncated=True)
            said = as_said(reply, self._form, self._in_words), reply.finish
            found = await _asked(lambda answered, said=said: self._pool.step(number, said[0], answered, said[1]))  # type: ignore[misc]
            rewards[reply.turn], metrics = found["reward"], added(metrics, found["metrics"])
            if found["done"]:
                break
            seen = of_calls(_messages(found["observation"]), reply)
            messages = [*messages, reply.message, *in_parts(seen, found["pictures"])]
        if not found["done"]:
            await self._settle(number, rewards)
        return Played(0.0, _measured(turn, metrics), rewards, truncated=not found["done"])

    async def _settle(self, number: int, rewards: dict[int | str, float]) -> None:
        """Its task has not ended: its object may give a reward all the same, which is the last turn's."""
        if rewards and self._config.settles:
            given = (await _asked(lambda answered: self._pool.finish(number, answered)))["reward"]
            rewards[next(reversed(rewards))] += given or 0.0

    async def close(self) -> None:
        """See `Player.close`."""
        await asyncio.to_thread(self._pool.close)


def _measured(turns: int, metrics: Mapping[str, float]) -> dict[str, float]:
    """What a gateway is told: how many turns there were, too, where that has room beside what the environment has
    measured. Raises `PlayError` where this is too much."""
    if why := fault(metrics):
        raise PlayError(f"metrics of the session: {why}")
    found = {"turns": float(turns), **metrics}
    return found if len(found) <= MOST else dict(metrics)


def as_said(reply: Reply, form: Form = "hermes", words: bool = True) -> str:
    """What a class is told: the text, with its ``words``, and each call as Hermes writes them, whatever the model's own
    way is; where it reads calls in ``json``, a list of them and nothing else. As XML it reads Hermes' too."""
    asked = [json.dumps({"name": name, "arguments": arguments}) for name, arguments, _ in reply.calls]
    if asked and form == "json":
        return f"[{', '.join(asked)}]"
    # What an argument says is not the call's end: JSON may write it so, too.
    calls = [f"{OPEN}\n{call.replace(CLOSE, ESCAPED)}\n{CLOSE}" for call in asked]
    return "\n".join([*([reply.text] if words and (reply.text or not calls) else []), *calls])


def _messages(observation: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": observation}] if isinstance(observation, str) else observation


def of_calls(messages: list[dict[str, Any]], reply: Reply) -> list[dict[str, Any]]:
    """A tool's messages without an id are the results of the reply's calls, in their order: some templates want to know
    of which."""
    ids = iter([call["id"] for call in reply.message.get("tool_calls", ()) if call.get("id")])

    def told(message: dict[str, Any]) -> dict[str, Any]:
        if message.get("role") != "tool" or message.get("tool_call_id"):
            return message
        id = next(ids, None)
        return message if id is None else {**message, "tool_call_id": id}

    return [told(message) for message in messages]


async def _asked(call: Callable[[Callable[[dict[str, Any] | None, str], None]], None]) -> dict[str, Any]:
    """What a worker answers. Raises `PlayError`, `LostError` among it."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[tuple[dict[str, Any] | None, str]] = loop.create_future()

    def settle(found: dict[str, Any] | None, error: str) -> None:
        if not answer.done():
            answer.set_result((found, error))

    def heard(found: dict[str, Any] | None, error: str) -> None:  # in the pool's thread
        loop.call_soon_threadsafe(settle, found, error)

    call(heard)
    found, error = await answer
    if found is None:
        raise LostError() if error == LOST else PlayError(error)
    return found
