"""Environments of the verifiers library: https://github.com/PrimeIntellect-ai/verifiers."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
from collections.abc import Mapping
from typing import Any

from penstock.protocols.agent_client import AsyncAgentSession
from penstock.protocols.measured import added
from penstock.services.data import need
from penstock.services.players.base import NO_ROOM, Played, PlayError

MOST_TASKS = 100_000
"""Of a taskset without end."""
KEY = "PENSTOCK_AGENTS_KEY"
"""The variable that verifiers takes the gateway's key from."""


class VerifiersPlayer:
    """One episode for each session: the library's own programs ask the policy, at the session's own address. The row
    of the run's task says which of the taskset's tasks it is. ``config`` is the library's `EnvConfig`, as a map."""

    def __init__(self, taskset: str, config: Mapping[str, Any], key: str) -> None:
        need("verifiers", "verifiers", "ENVIRONMENT")
        os.environ[KEY] = key
        self._library = importlib.import_module("verifiers.v1")
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        own = dict(config)
        own["taskset"] = {**own.get("taskset", {}), "id": taskset}
        self._env = loaders.load_environment(loaders.resolve_env_config(own))
        self._tasks: list[Any] = list(itertools.islice(self._env.taskset, MOST_TASKS))
        if not self._tasks:
            raise PlayError(f"ENVIRONMENT: the taskset {taskset!r} has no tasks")
        self._serving = contextlib.AsyncExitStack()

    async def open(self) -> None:
        """See `Player.open`."""
        await self._serving.enter_async_context(self._env.serving())

    async def play(self, session: AsyncAgentSession) -> Played:
        """See `Player.play`. Rewards and metrics of an episode's traces are added up; of several agents they
        must be alike, else whoever wins would learn what whoever loses does. One that has come to the end of
        the room, or of its turns, has failed by the library's count, and is over by ours."""
        client = self._library.EvalClientConfig(base_url=session.base_url, api_key_var=KEY)
        context = self._library.ModelContext(model="policy", client=client)
        episode = await self._env.run_episode(self._tasks[session.task.index % len(self._tasks)], context)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        without_room = [any(code in error.message for code in NO_ROOM) for error in errors]  # the gateway's answers
        ended = bool(errors) and all(without_room)
        if not episode.ok and not ended:
            raise PlayError("; ".join(f"{error.type}: {error.message}" for error in errors) or "an episode failed")
        worth: dict[str, float] = {}
        for trace in [
            each for each in episode.traces if getattr(each.agent, "trainable", True)
        ] or episode.traces:  # a user is played
            worth[trace.agent.name] = worth.get(trace.agent.name, 0.0) + float(trace.reward)
        if len({*worth.values()}) > 1:
            told = ", ".join(f"{name} {reward:g}" for name, reward in worth.items())
            raise PlayError(f"an episode of several agents that are worth different rewards ({told}), added up to one")
        metrics: dict[str, float] = {}
        for trace in episode.traces:
            metrics = added(metrics, {name: float(value) for name, value in trace.metrics.items() if value is not None})
        truncated = ended or any(trace.is_truncated for trace in episode.traces)
        return Played(sum(worth.values()), metrics, truncated=truncated)

    async def close(self) -> None:
        """See `Player.close`."""
        await self._serving.aclose()
