"""A gateway's desk with the real engine and tokenizer, and in the broker's place a record of what was said."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from penstock.protocols import messages as m
from penstock.protocols.experience import Group, Prompt, Sampling, as_bytes
from penstock.protocols.mailbox import RefusedError
from penstock.services.gateway.config import GatewayConfig
from penstock.services.gateway.desk import Desk
from penstock.services.gateway.work import Key
from penstock.services.rollout.engines.base import Engine
from penstock.services.rollout.turn_server import TurnServer
from penstock.services.turns.answers import Answer, unpack_answer
from penstock.services.turns.tokenizer import Tokenizer
from tests.rollout.test_torch_engine import engine_for

CALLS = "tests.gateway.house:calls"


def calls(text: str) -> tuple[str, list[Any]]:
    """Whatever is said is the argument of a tool."""
    from penstock.services.turns.tool_calls import Call

    return "", [Call("reveal", {"letters": text})]


class House:
    """`run` plays ``agent`` in an asyncio loop, beside the engine."""

    def __init__(
        self,
        folder: Path | None = None,
        model: Any = None,
        reads: Callable[[str], bool] = lambda source: True,
        engine: Engine | None = None,
        text: Tokenizer | None = None,
        max_length: int = 64,
        **config: Any,
    ) -> None:
        self.engine = engine or engine_for(model, {1})
        self.text, self._max_length = text or Tokenizer(str(folder)), max_length
        self.turns = TurnServer(self.engine, self.text)
        self.asked: dict[int, tuple[m.TurnRequest, Future[m.Message]]] = {}
        self.records: dict[Key, dict[str, np.ndarray]] = {}
        self.engines_own: list[Answer] = []
        """Everything that the engine has sampled, in its own words."""
        self.delivered: dict[Key, Group | str] = {}
        self._config, self._reads = GatewayConfig.model_validate(config), reads
        self.seed = 5
        self.refuse = ""
        """The code that the broker refuses everything with."""
        self.desk = self.open()

    def open(self) -> Desk:
        """A gateway; another one takes over what the one before has had kept."""
        self.desk = Desk(
            self._config, self.text, self._max_length, self.say, self._deliver, lambda key: None, self._reads
        )
        return self.desk

    def lease(self, number: int, n: int = 1, new: int = 4, greedy: bool = False, source: str = "") -> m.Lease:
        """A group for the gateway, with what is kept of it."""
        prompt = Prompt(index=number, text="sort ba=", truth="ab")
        sampling = Sampling(n=n, max_new_tokens=new, greedy_baseline=greedy)
        records = self.records.setdefault(("train", number), {})
        return m.Lease(
            purpose="train",
            number=number,
            attempt=1,
            seed=5,
            prompt=prompt,
            sampling=sampling,
            source=source,
            records=dict(records),
        )

    def say(self, message: m.Message, deadline_s: float) -> Future[m.Message]:
        """In the broker's place."""
        future: Future[m.Message] = Future()
        if self.refuse:
            future.set_exception(RefusedError(m.Refused.model_validate({"code": self.refuse, "reason": "no"})))
        elif isinstance(message, m.Note):
            self.records[message.purpose, message.number][message.name] = message.data
            future.set_result(m.Ack())
        else:
            assert isinstance(message, m.TurnRequest)
            number = len(self.asked) + 1
            self.asked[number] = message, future
            asked = m.Generate(
                id=number, seed=self.seed, prompt=message.prompt, sampling=message.sampling, stream=message.stream,
                pictures=message.pictures, sampled=message.sampled,
            )  # fmt: skip
            if (refused := self.turns.start(asked)) is not None:
                future.set_result(m.TurnAnswer(answer=refused.answer, error=refused.error))
        return future

    def _deliver(self, lease: m.Lease, made: Group | str) -> None:
        self.delivered[lease.purpose, lease.number] = made

    async def _generate(self) -> None:
        while True:
            for result in self.engine.step() if self.engine.pending() else []:
                said = self.turns.take(result)
                assert said is not None
                request, future = self.asked[said.id]
                key = request.key.purpose, request.key.number
                self.records[key][request.key.note_record] = request.note
                self.records[key][request.key.answer_record] = as_bytes(said.answer.tobytes())
                self.engines_own.append(unpack_answer(said.answer.tobytes()))
                if not future.cancelled():
                    future.set_result(m.TurnAnswer(answer=said.answer))
            await asyncio.sleep(0 if self.engine.pending() else 0.001)

    def run(self, agent: Callable[[], Awaitable[Any]], seconds: float = 60) -> Any:
        """What ``agent`` returns."""

        async def main() -> Any:
            engine = asyncio.ensure_future(self._generate())
            try:
                return await asyncio.wait_for(agent(), seconds)
            finally:
                engine.cancel()

        return asyncio.run(main())
