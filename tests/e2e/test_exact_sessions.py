"""Random sessions through a whole run, on each engine: what is trained on is what the engine sampled."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

import penstock
from penstock.protocols.agent_client import AgentRefusedError, AsyncAgentSession
from penstock.services.broker import archive
from tests.e2e.runs import Run, check_promises
from tests.e2e.test_agents import CONFIG, TINY, TOOL, pieces

AT_ONCE = 24
PER_STEP = 16
"""Sessions."""
ENGINES = {
    "torch": "{type: torch, max_sequences: 64, max_length: 96}",
    "vllm": "{type: vllm, max_sequences: 64, max_length: 96, vllm: {enforce_eager: true}}",
}
ENDS = {"context_length_exceeded", "too_many_turns"}


class Heard:
    """Log-probabilities of each turn that an agent has heard, float32 ``[tokens]``, by session."""

    def __init__(self) -> None:
        self.finished: dict[str, list[np.ndarray]] = {}
        self.asked_again = self.given_up = self.branches = 0


class Agent:
    """One session: turns over ZeroMQ and over HTTP, as chance has it; it branches, rewrites its history, uses tools,
    and asks with a patience so short that it must ask again."""

    def __init__(self, session: AsyncAgentSession, chance: random.Random, heard: Heard) -> None:
        self._session, self._chance, self._all = session, chance, heard
        self._asked: list[dict[str, Any]] = [{"role": "user", "content": session.task.text}]
        self.heard: list[np.ndarray] = []

    async def play(self) -> None:
        """Until it has had its turns, or there is no room left."""
        known = [self._asked]
        for _ in range(self._chance.randint(1, 5)):
            messages = self._chance.choice(known)
            self._all.branches += messages is not known[-1]
            if self._chance.random() < 0.15:  # as an agent does that compacts
                messages = [{"role": "user", "content": "sort ba="}]
            try:
                said = await (self._over_http if self._chance.random() < 0.6 else self._over_zeromq)(messages)
            except AgentRefusedError as refused:
                if refused.code not in ENDS:
                    raise
                return
            except openai.BadRequestError as refused:
                if refused.code not in ENDS:
                    raise
                return
            for message in said:
                calls = message.get("tool_calls")
                result = {"role": "tool", "tool_call_id": calls[0]["id"]} if calls else {"role": "user"}
                known.append([*messages, message, {**result, "content": "ab"}])

    async def _over_zeromq(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        reply = await self._session.chat(messages, [TOOL])
        self.heard.append(reply.logprobs)
        return [reply.message]

    async def _over_http(self, messages: list[Any]) -> list[dict[str, Any]]:
        base, id = self._session.base_url, self._session.id
        patience = self._chance.choice([0.02, 0.1, 60.0])
        by_key = {"base_url": base.replace(f"/s/{id}", ""), "api_key": id}
        by_path = {"base_url": base, "api_key": "none"}
        several, stream = self._chance.choice([1, 1, 2]), self._chance.random() < 0.5
        async with openai.AsyncOpenAI(
            **self._chance.choice([by_key, by_path]),
            max_retries=12,
            timeout=httpx.Timeout(30.0, read=patience),
            http_client=openai.DefaultAsyncHttpxClient(event_hooks={"request": [self._count]}),
        ) as client:
            about: Any = {"model": "policy", "tools": [TOOL], "logprobs": True, "n": several}
            if stream:
                return await self._streamed(client, messages, about)
            answer = await client.chat.completions.create(messages=messages, **about)
            for choice in answer.choices:
                assert choice.logprobs and choice.logprobs.content
                self.heard.append(np.array([each.logprob for each in choice.logprobs.content], np.float32))
            return [choice.message.model_dump(exclude_none=True) for choice in answer.choices]

    async def _streamed(self, client: openai.AsyncOpenAI, messages: list[Any], about: Any) -> list[dict[str, Any]]:
        said: dict[int, dict[str, Any]] = {}
        heard: dict[int, np.ndarray] = {}
        async for part in await client.chat.completions.create(messages=messages, stream=True, **about):
            for choice in part.choices:
                mine = said.setdefault(choice.index, {"role": "assistant", "content": None})
                mine["content"] = choice.delta.content or mine["content"]
                for call in choice.delta.tool_calls or ():
                    mine["tool_calls"] = [call.model_dump(exclude={"index"}, exclude_none=True)]
                if choice.logprobs and choice.logprobs.content:
                    heard[choice.index] = np.array([each.logprob for each in choice.logprobs.content], np.float32)
        self.heard += heard.values()
        return list(said.values())

    async def _count(self, request: httpx.Request) -> None:
        self._all.asked_again += request.headers.get("x-stainless-retry-count", "0") != "0"


async def play_all(folder: Path, heard: Heard) -> None:
    """Agents until the run is over."""

    async def work(number: int) -> None:
        chance = random.Random(number)
        while True:
            try:
                async with await client.session(wait_s=120) as session:
                    agent = Agent(session, chance, heard)
                    try:
                        await agent.play()
                    except (openai.APITimeoutError, openai.APIConnectionError) as error:
                        heard.given_up += 1
                        await session.abandon(str(error))
                        continue
                    if not agent.heard:
                        await session.abandon("nothing was said")
                        continue
                    await session.finish(reward=chance.random())
                    heard.finished[session.id] = agent.heard
            except (penstock.RunOver, openai.APIStatusError):
                return

    async with penstock.AsyncAgentClient(folder) as client, asyncio.TaskGroup() as group:
        for number in range(AT_ONCE):
            group.create_task(work(number))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("engine", "steps"),
    [
        pytest.param("torch", 63, marks=pytest.mark.chaos),
        pytest.param("vllm", 63, marks=pytest.mark.vllm),
    ],
)
def test_sessions_are_trained_on_bit_for_bit(tmp_path: Path, engine: str, steps: int) -> None:
    record = tmp_path / "record"
    record.mkdir()
    rollout = f"{{engine: {ENGINES[engine]}, sampling: {{n: 4, max_new_tokens: 12}}}}"
    plugin = f"{{type: plugin, name: 'tests.e2e.recorder:recorded', options: {{record: {record}, rollout: {rollout}}}}}"
    settings = [f"trainer.steps={steps}", "rollout.count=1", f"rollout.engine={plugin}"]
    run = Run(tmp_path, [*TINY, *settings], CONFIG)
    heard = Heard()
    asyncio.run(asyncio.wait_for(play_all(run.folder, heard), 800))
    check_promises(run.wait(60))

    trained: Counter[Any] = Counter()
    mixed, due = 0, Counter[float]()
    sessions = 0
    for batch, _ in archive.read(run.folder, 0):
        for taken in batch.groups:
            mine = {name: said for name, said in heard.finished.items() if name.startswith(f"train-{taken.number}-")}
            assert len(mine) == 4, "a group is trained on when all of its sessions have ended"
            sessions += len(mine)
            due += Counter(np.concatenate([np.concatenate(said) for said in mine.values()]).clip(max=0).tolist())
            for t in archive.open_group(taken).trajectories:
                on = t.loss_mask == 1
                trained += pieces(t.tokens[on], t.logprobs[on], t.versions[on])
                mixed += len(set(t.versions[on].tolist())) > 1
    sampled: Counter[Any] = Counter()
    for line in (line for file in record.iterdir() for line in file.read_text().splitlines()):
        tokens, logprobs, versions = (np.array(each) for each in json.loads(line))
        sampled += pieces(tokens, logprobs.clip(max=0), versions)
    assert not trained - sampled, "each is the engine's own, with its log-probability and version, and there once"
    by_logprob: Counter[float] = Counter()
    for (_, logprob, _), count in trained.items():
        by_logprob[logprob] += count
    assert by_logprob == due, "what agents have heard is trained on, and nothing else"
    assert sessions == PER_STEP * steps and mixed > 20 and heard.branches > 80 and heard.asked_again > 40
    assert heard.given_up < 20
