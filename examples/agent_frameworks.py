"""One task in twelve clients and frameworks, all at once in one run: each does what its users do, none is changed.

pip install openai anthropic openai-agents 'pydantic-ai-slim[openai]' langgraph langchain-openai
penstock run configs/agent.yaml run.name=mixed gateway.tool_calls=examples.agent_frameworks:two_calls
python examples/agent_frameworks.py runs/mixed rewards.jsonl
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TextIO, TypedDict

import agents
import anthropic
import openai
import pydantic_ai
from langchain_core.messages import AnyMessage, HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import END, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

import penstock
from penstock.services.turns.tool_calls import Call

HIDDEN = 3
"""At most so many letters can be seen before the tool is called: a shorter answer is a call, a longer one is none."""
FIELD = {"type": "object", "properties": {"letters": {"type": "string"}}, "required": ["letters"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "Letters.", "parameters": FIELD}}
    for name in ("count", "reveal")
]


def two_calls(text: str) -> tuple[str, list[Call]]:
    """How this model asks for both of its tools, in parallel: a short answer is the argument of both."""
    if len(text) > HIDDEN:
        return text, []
    return "", [Call("count", {"letters": text}), Call("reveal", {"letters": text})]


class Puzzle:
    """Half of the letters are hidden; `reveal` shows all of them, if it is called with those that can be seen."""

    def __init__(self, task: penstock.Prompt) -> None:
        letters = list(task.truth)
        random.Random(task.index).shuffle(letters)
        self.truth, self._letters = str(task.truth), letters
        self._shown = letters[: max(2, min(HIDDEN, len(letters) // 2))]
        self.question, self.revealed = f"sort {''.join(self._shown)}=", False

    def count(self, letters: str) -> str:
        """How many there are."""
        return str(len(letters))

    def reveal(self, letters: str) -> str:
        """All letters, if these are the ones that can be seen."""
        if sorted(letters) != sorted(self._shown):
            return "no"
        self.revealed = True
        return f" sort {''.join(self._letters)}="

    def use(self, name: str, letters: str) -> str:
        """Either tool."""
        return self.reveal(letters) if name == "reveal" else self.count(letters)

    def reward(self, answer: str | None) -> float:
        """A third for a right call, all of it for the right answer."""
        return 1.0 if self.revealed and answer == self.truth else 1 / 3 if self.revealed else 0.0


async def openai_chat(url: str, puzzle: Puzzle, stream: bool = False) -> str | None:
    """Chat completions, as asyncio speaks them."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        said: list[Any] = [{"role": "user", "content": puzzle.question}]
        first = (await client.chat.completions.create(model="policy", messages=said, tools=TOOLS)).choices[0].message
        said.append(first)
        for call in first.tool_calls or []:
            found = puzzle.use(call.function.name, **json.loads(call.function.arguments))
            said.append({"role": "tool", "tool_call_id": call.id, "content": found})
        if not puzzle.revealed:
            return None
        if not stream:
            second = await client.chat.completions.create(model="policy", messages=said, tools=TOOLS)
            return second.choices[0].message.content
        parts = await client.chat.completions.create(model="policy", messages=said, tools=TOOLS, stream=True)
        return "".join([part.choices[0].delta.content or "" async for part in parts if part.choices])


async def openai_stream(url: str, puzzle: Puzzle) -> str | None:
    """The same, streamed."""
    return await openai_chat(url, puzzle, stream=True)


async def openai_threads(url: str, puzzle: Puzzle) -> str | None:
    """The responses API in the client that blocks, in a thread; each response goes on from the one before."""

    def play() -> str | None:
        tools: list[Any] = [{"type": "function", "strict": False} | tool["function"] for tool in TOOLS]
        with openai.OpenAI(base_url=url, api_key="none") as client:
            first = client.responses.create(model="policy", input=puzzle.question, tools=tools)
            found: list[Any] = [
                {
                    "type": "function_call_output",
                    "call_id": item.call_id,
                    "output": puzzle.use(item.name, **json.loads(item.arguments)),
                }
                for item in first.output
                if item.type == "function_call"
            ]
            if not puzzle.revealed:
                return None
            return client.responses.create(
                model="policy", input=found, tools=tools, previous_response_id=first.id
            ).output_text

    return await asyncio.to_thread(play)


async def anthropic_stream(url: str, puzzle: Puzzle) -> str | None:
    """Anthropic's messages; the second one streamed."""
    tools: Any = [{"name": t["function"]["name"], "description": "Letters.", "input_schema": FIELD} for t in TOOLS]
    async with anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="none") as client:
        said: list[Any] = [{"role": "user", "content": puzzle.question}]
        first = await client.messages.create(model="policy", max_tokens=12, messages=said, tools=tools)
        results = [
            {"type": "tool_result", "tool_use_id": part.id, "content": puzzle.use(part.name, **part.input)}
            for part in first.content
            if part.type == "tool_use"
        ]
        if not puzzle.revealed:
            return None
        said += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        async with client.messages.stream(model="policy", max_tokens=12, messages=said, tools=tools) as stream:
            return "".join([text async for text in stream.text_stream])


async def forgetful(url: str, puzzle: Puzzle) -> str | None:
    """An agent that compacts its history: the second request has the tool's result alone, as a branch."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        said: list[Any] = [{"role": "user", "content": puzzle.question}]
        first = (await client.chat.completions.create(model="policy", messages=said, tools=TOOLS)).choices[0].message
        for call in first.tool_calls or []:
            found = puzzle.use(call.function.name, **json.loads(call.function.arguments))
        if not puzzle.revealed:
            return None
        said = [{"role": "user", "content": found.strip()}]
        return (await client.chat.completions.create(model="policy", messages=said)).choices[0].message.content


async def agents_sdk(url: str, puzzle: Puzzle, stream: bool = False) -> str | None:
    """OpenAI's agents SDK over chat completions."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        agent = agents.Agent(
            "sorter",
            model=agents.OpenAIChatCompletionsModel("policy", client),
            tools=[agents.function_tool(puzzle.count), agents.function_tool(puzzle.reveal)],
        )
        with suppress(agents.AgentsException):
            if not stream:
                return (await agents.Runner.run(agent, puzzle.question, max_turns=2)).final_output
            result = agents.Runner.run_streamed(agent, puzzle.question, max_turns=2)
            async for _ in result.stream_events():
                pass
            return result.final_output
    return None


async def agents_sdk_stream(url: str, puzzle: Puzzle) -> str | None:
    """The same, streamed."""
    return await agents_sdk(url, puzzle, stream=True)


async def agents_sdk_helper(url: str, puzzle: Puzzle) -> str | None:
    """The agents SDK over responses: a tool asks a second agent, whose answer is the first one's."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        policy = agents.OpenAIResponsesModel("policy", client)
        helper = agents.Agent("helper", model=policy)

        async def reveal(letters: str) -> str:
            """Has the second agent sort all letters, if these are the ones that can be seen."""
            found = puzzle.reveal(letters)
            return (await agents.Runner.run(helper, found.strip())).final_output if puzzle.revealed else found

        agent = agents.Agent(
            "sorter",
            model=policy,
            tools=[agents.function_tool(puzzle.count), agents.function_tool(reveal)],
            tool_use_behavior={"stop_at_tool_names": ["reveal"]},
        )
        with suppress(agents.AgentsException):
            return (await agents.Runner.run(agent, puzzle.question, max_turns=2)).final_output
    return None


async def pydantic(url: str, puzzle: Puzzle, stream: bool = False) -> str | None:
    """Pydantic AI."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        policy = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
        agent = pydantic_ai.Agent(policy, tools=[puzzle.count, puzzle.reveal])
        with suppress(pydantic_ai.exceptions.AgentRunError):
            if not stream:
                found = await agent.run(puzzle.question, usage_limits=UsageLimits(request_limit=2))
                return found.output
            async with agent.run_stream(puzzle.question, usage_limits=UsageLimits(request_limit=2)) as parts:
                return await parts.get_output()
    return None


async def pydantic_stream(url: str, puzzle: Puzzle) -> str | None:
    """The same, streamed."""
    return await pydantic(url, puzzle, stream=True)


class Talk(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


async def langgraph(url: str, puzzle: Puzzle) -> str | None:
    """LangGraph, with LangChain's model, streamed."""
    tools = [puzzle.count, puzzle.reveal]
    policy = ChatOpenAI(model="policy", base_url=url, api_key="none", streaming=True).bind_tools(tools)

    async def ask(state: Talk) -> dict[str, Any]:
        return {"messages": [await policy.ainvoke(state["messages"])]}

    graph = StateGraph(Talk)
    graph.add_node("policy", ask)
    graph.add_node("tools", ToolNode(tools))
    graph.set_entry_point("policy")
    graph.add_conditional_edges("policy", lambda state: "tools" if state["messages"][-1].tool_calls else END)
    graph.add_edge("tools", "policy")
    with suppress(GraphRecursionError):
        found = await graph.compile().ainvoke({"messages": [HumanMessage(puzzle.question)]}, {"recursion_limit": 4})
        return found["messages"][-1].content
    return None


PLAYERS: list[Callable[[str, Puzzle], Awaitable[str | None]]] = [
    openai_chat, openai_stream, openai_threads, anthropic_stream, forgetful, agents_sdk, agents_sdk_stream,
    agents_sdk_helper, pydantic, pydantic_stream, langgraph,
]  # fmt: skip


async def over_zmq(session: penstock.AsyncAgentSession, puzzle: Puzzle) -> str | None:
    """Penstock's own client, without HTTP."""
    said: list[Any] = [{"role": "user", "content": puzzle.question}]
    first = await session.chat(said, TOOLS)
    said.append(first.message)
    for name, arguments, id in first.calls:
        said.append({"role": "tool", "tool_call_id": id, "content": puzzle.use(name, **arguments)})
    return (await session.chat(said, TOOLS)).text if puzzle.revealed else None


async def work(client: penstock.AsyncAgentClient, player: int, log: TextIO) -> None:
    """One task after the other, each in the next client, until the run is over."""
    while True:
        player = (player + 1) % (len(PLAYERS) + 1)
        name = "over_zmq" if player == len(PLAYERS) else PLAYERS[player].__name__
        try:
            async with await client.session(wait_s=300) as session:
                puzzle = Puzzle(session.task)
                if player == len(PLAYERS):
                    answer = await over_zmq(session, puzzle)
                else:
                    answer = await PLAYERS[player](session.base_url, puzzle)
                await session.finish(reward=puzzle.reward(answer))
        except penstock.RunOver:
            return
        if session.purpose == "train":
            print(json.dumps({"client": name, "reward": puzzle.reward(answer)}), file=log, flush=True)


async def main(run: str, file: str, at_once: int = 64) -> None:
    agents.set_tracing_disabled(True)
    with Path(file).open("w") as log:
        async with penstock.AsyncAgentClient(run) as client, asyncio.TaskGroup() as group:
            for number in range(at_once):
                group.create_task(work(client, number, log))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
