"""Agents' sessions over any engine: a thousand of them, with weights that change in the middle of turns, clients that
time out and ask again, tools and branches; what is delivered is the engine's own record, bit for bit, each token once.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from penstock.protocols.experience import Group
from penstock.protocols.packed_groups import pack_group, unpack_group
from penstock.services.gateway.conversation import Conversation
from penstock.services.gateway.desk import Desk
from penstock.services.gateway.errors import AgentError
from penstock.services.gateway.questions import Asking
from penstock.services.gateway.session import Turn
from penstock.services.gateway.work import Held
from tests.engines.workbench import LETTERS, Workbench
from tests.gateway.house import CALLS, House

SESSIONS, AT_ONCE = 1000, 32
TOOLS: Any = [{"type": "function", "function": {"name": "reveal", "parameters": {"type": "object"}}}]
SOON = (0.0, 0.002, 0.02)
"""Seconds after which a client asks again."""


class Agent:
    """Talks with the policy until no room is left, or it has had enough."""

    def __init__(self, desk: Desk, held: Held, chance: random.Random) -> None:
        self._desk, self._held, self._chance = desk, held, chance
        self._requests = itertools.count()

    async def play(self) -> None:
        chats: list[list[dict[str, Any]]] = [[{"role": "user", "content": self._words()}]]
        for _ in range(self._chance.randint(1, 5)):
            said, tools = self._chance.choice(chats), self._chance.choice([None, TOOLS])
            if self._chance.random() < 0.15:  # it has compacted its history
                said = [{"role": "user", "content": self._words()}]
            try:
                turn = await self._ask(said, tools)
            except AgentError as error:
                assert error.code == "context_length_exceeded", error
                return
            answer = {"role": "tool", "tool_call_id": "x"} if tools else {"role": "user"}
            chats.append([*said, turn.message, answer | {"content": self._words()}])

    async def _ask(self, said: list[dict[str, Any]], tools: Any) -> Turn:
        """Asked again and again, until it is heard; the last one has patience."""
        request = f"{self._held.id}-{next(self._requests)}"
        for seconds in [*self._chance.sample(SOON, self._chance.choice([0, 0, 1, 2])), 120.0]:
            try:
                return await asyncio.wait_for(
                    self._desk.chat(self._held, Conversation(said, tools), asked=Asking(key=request)), seconds
                )
            except TimeoutError:
                continue
        raise AssertionError("no answer")

    def _words(self) -> str:
        return "".join(self._chance.choices(LETTERS, k=self._chance.randint(1, 5)))


def pieces(tokens: np.ndarray, logprobs: np.ndarray, versions: np.ndarray) -> Iterable[tuple[int, bytes, int]]:
    return zip(tokens.tolist(), [value.tobytes() for value in logprobs.clip(max=0)], versions.tolist(), strict=True)


@pytest.mark.timeout(600)
def test_a_thousand_sessions_are_delivered_as_the_engine_said_them(bench: Workbench, tmp_path: Any) -> None:
    house = House(engine=bench.engine, text=bench.text, max_length=100, tool_calls=CALLS, sessions=AT_ONCE)
    chance = random.Random(0)

    async def publish() -> None:
        for which in itertools.cycle((1, 0)):
            await asyncio.sleep(0.1)
            bench.publish(which)

    async def work(numbers: Iterable[int]) -> None:
        for number in numbers:
            house.desk.start(house.lease(number, new=10))
            held = await house.desk.open(1)
            await Agent(house.desk, held, random.Random(chance.random())).play()
            await house.desk.finish(held.id, 0.5)

    async def play() -> None:
        publishing = asyncio.ensure_future(publish())
        numbers = iter(range(SESSIONS))
        await asyncio.gather(*(work(numbers) for _ in range(AT_ONCE)))
        publishing.cancel()

    house.run(play, 500)
    own: Counter[tuple[int, bytes, int]] = Counter()
    changed = 0
    for answer in house.engines_own:
        own.update(pieces(answer.tokens, answer.logprobs, answer.versions))
        changed += len(set(answer.versions.tolist())) > 1
    found: Counter[tuple[int, bytes, int]] = Counter()
    branches = 0
    for made in house.delivered.values():
        assert isinstance(made, Group), made
        trajectories = unpack_group(pack_group(made)).trajectories
        branches += len(trajectories) > 1
        for t in trajectories:
            on = t.loss_mask == 1
            found.update(pieces(t.tokens[on], t.logprobs[on], t.versions[on]))
    assert len(house.delivered) == SESSIONS and len(house.engines_own) > 2 * SESSIONS
    assert found == own
    assert branches > SESSIONS // 10, "some agents have branched"
    assert changed > 50, "some turns were under way when the weights changed"
