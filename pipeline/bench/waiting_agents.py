"""Agents whose tools take their time, as a process of its own: see `gateway`.

A task has two turns: half of the letters are asked for, a tool is called that waits, and then all of them are.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from penstock.pipeline.bench.judge import wait_s
from penstock.protocols.agent_client import AsyncAgentClient, AsyncAgentSession, RunOver
from penstock.protocols.experience import Prompt

LONGEST = 8.0
"""No tool waits longer than so many times the mean."""


def tool_s(mean_s: float) -> float:
    """Seconds that a tool takes, as a judge does; 0: none."""
    return wait_s(mean_s, LONGEST * mean_s) if mean_s else 0.0


def shown(task: Prompt) -> str:
    """The first question: half of the letters."""
    letters = str(task.text).removeprefix("sort ").removesuffix("=")
    return f"sort {letters[: max(2, len(letters) // 2)]}="


def reward(first: str, second: str, task: Prompt) -> float:
    """A third for the first answer, the rest for the second."""
    half = "".join(sorted(shown(task).removeprefix("sort ").removesuffix("=")))
    return (float(first == half) + 2 * float(second == task.truth)) / 3


class Agents:
    """So many tasks at once, until the run is over."""

    def __init__(self, think_s: float, mean_s: float) -> None:
        self._think_s, self._mean_s = think_s, mean_s
        self.turns: list[tuple[float, float]] = []
        """Of each turn: seconds from the question to the answer, and of these in the engine."""
        self.finished = 0

    async def work(self, client: AsyncAgentClient) -> None:
        """One task after the other."""
        while True:
            try:
                async with await client.session(wait_s=300) as session:
                    await session.finish(reward=await self._play(session))
                    self.finished += 1
            except RunOver:
                return

    async def _play(self, session: AsyncAgentSession) -> float:
        said: list[dict[str, Any]] = [{"role": "user", "content": shown(session.task)}]
        first = await self._ask(session, said)
        await asyncio.sleep(tool_s(self._mean_s))
        said += [first, {"role": "user", "content": session.task.as_text()}]
        second = await self._ask(session, said)
        return reward(first["content"], second["content"], session.task)

    async def _ask(self, session: AsyncAgentSession, said: list[dict[str, Any]]) -> dict[str, Any]:
        if self._think_s:
            await asyncio.sleep(random.expovariate(1 / self._think_s))
        began = time.perf_counter()
        reply = await session.chat(said)
        self.turns.append((time.perf_counter() - began, reply.engine_s))
        return reply.message


async def main(run: str, out: str, count: int, think_s: float, mean_s: float) -> None:
    """Writes what the turns took to ``out`` when the run is over."""
    agents = Agents(think_s, mean_s)
    async with AsyncAgentClient(run) as client, asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(agents.work(client))
    Path(out).write_text(json.dumps({"turns": agents.turns, "finished": agents.finished}))


if __name__ == "__main__":
    _run, _out, _count, _think, _mean = sys.argv[1:]
    asyncio.run(main(_run, _out, int(_count), float(_think), float(_mean)))
