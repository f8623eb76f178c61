"""Environments that speak OpenEnv's protocol, wherever they are served: https://huggingface.co/docs/openenv."""

from __future__ import annotations

import asyncio
import importlib
import json
from typing import Any

import structlog
from pydantic import Field

from penstock.protocols.agent_client import AgentRefusedError, AsyncAgentSession
from penstock.protocols.mailbox import DeadlineError
from penstock.services.data import need
from penstock.services.players.base import Played, PlayError, as_messages, said_to
from penstock.services.runtime.settings import Section

log = structlog.get_logger()

CLOSE_S = 10.0


class OpenEnvConfig(Section):
    """How a policy's words become actions, and observations words."""

    url: str
    """Where it is served, e.g. ``http://127.0.0.1:8000``."""
    action: str | None = None
    """The action's field that what the policy says is put into, e.g. ``message``; null: the environment's tools are
    called (MCP)."""
    observation: str | None = None
    """The observation's field that the policy reads, e.g. ``output``; null: all of it, as JSON."""
    task_first: bool = False
    """The policy reads the run's task before the environment's first observation."""
    max_turns: int = Field(8, ge=1)
    """Turns that the policy has at most."""
    timeout_s: float = Field(60.0, gt=0)
    """Seconds that the environment has for an answer."""


class OpenEnvPlayer:
    """One connection, and so one environment, for each session; the run's task seeds it, so that it is the same for a
    group. A turn is worth what its steps gave, and the session what the reset gave beside."""

    def __init__(self, config: OpenEnvConfig) -> None:
        need("openenv", "openenv", "ENVIRONMENT")
        self._config = config
        self._client = importlib.import_module("openenv.core.generic_client").GenericEnvClient

    async def open(self) -> None:
        """See `Player.open`."""

    async def play(self, session: AsyncAgentSession) -> Played:
        """See `Player.play`."""
        client = self._client(base_url=self._config.url, message_timeout_s=self._config.timeout_s)
        try:
            await client.connect()
            return await self._play(session, client)
        except (
            AgentRefusedError,
            DeadlineError,
            PlayError,
        ):  # they are the errors below too, and not the environment's
            raise
        except (OSError, RuntimeError, TimeoutError) as error:
            raise PlayError(f"{self._config.url}: {type(error).__name__}: {error}") from error
        finally:
            try:
                await asyncio.wait_for(client.close(), CLOSE_S)
            except Exception as error:  # the session has been played, or has another error to tell of
                log.warning(
                    "a connection was not closed", url=self._config.url, error=f"{type(error).__name__}: {error}"
                )

    async def _play(self, session: AsyncAgentSession, client: Any) -> Played:
        begun = await client.reset(seed=session.task.index)
        tools = None if self._config.action else await _tools(client)
        messages = [*(as_messages(session.task) if self._config.task_first else []), self._read(begun.observation)]
        rewards, done = dict[int | str, float](), bool(begun.done)
        while not done and len(rewards) < self._config.max_turns:
            reply = await said_to(session, messages, tools)
            if reply is None:
                break
            rewards[reply.turn], messages = 0.0, [*messages, reply.message]
            if self._config.action:
                found = await client.step({self._config.action: reply.text})
                rewards[reply.turn], done = float(found.reward or 0.0), found.done
                messages.append(self._read(found.observation))
            else:
                done = not reply.calls  # an answer without a call is the last
                for name, arguments, id in reply.calls:
                    found = await client.step({"type": "call_tool", "tool_name": name, "arguments": arguments})
                    rewards[reply.turn] += float(found.reward or 0.0)
                    done = done or found.done
                    messages.append({**self._read(found.observation), "role": "tool", "tool_call_id": id})
                    if done:
                        break
        return Played(float(begun.reward or 0.0), {"turns": float(len(rewards))}, rewards, truncated=not done)

    async def close(self) -> None:
        """See `Player.close`."""

    def _read(self, observation: dict[str, Any]) -> dict[str, Any]:
        found: Any = observation
        if self._config.observation:
            if self._config.observation not in observation:
                raise PlayError(
                    f"observation: the environment's have no {self._config.observation!r}; they have "
                    f"{', '.join(observation)}"
                )
            found = observation[self._config.observation]
        return {"role": "user", "content": found if isinstance(found, str) else json.dumps(found)}


async def _tools(client: Any) -> list[dict[str, Any]]:
    listed = (await client.step({"type": "list_tools"})).observation.get("tools")
    if not listed:
        raise PlayError("the environment has no tools; say with action=FIELD what the policy's words are put into")
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool.get("input_schema") or {"type": "object"},
            },
        }
        for tool in listed
    ]
