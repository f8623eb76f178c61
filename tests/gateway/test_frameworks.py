"""Agent frameworks as they come from PyPI, against the doors as they are served: what they were told is delivered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypedDict

import agents
import httpx
import openai
import pydantic_ai
import pytest
from langchain_core.messages import AnyMessage, HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from penstock.protocols.experience import Group
from penstock.services.turns.tool_calls import Call
from tests.gateway.house import House
from tests.gateway.test_doors import group, opened, served

TWICE, ASKS = "tests.gateway.test_frameworks:twice", "tests.gateway.test_frameworks:asks"


def twice(text: str) -> tuple[str, list[Call]]:
    """Two calls at once, of all that is said."""
    return "", [Call("reveal", {"letters": text}), Call("reveal", {"letters": text[:1]})]


def asks(text: str) -> tuple[str, list[Call]]:
    """A call of the helper."""
    return "", [Call("helper", {"input": text})]


def played(house: House, play: Callable[[str], Awaitable[int]]) -> Group:
    """One session by a framework, given its base URL; it says how many turns it has had."""
    house.desk.start(house.lease(0, new=2))

    async def agent(url: str) -> int:
        async with httpx.AsyncClient(timeout=60) as http:
            session = await opened(url, http)
            turns = await play(session["base_url"])
            await http.post(f"{url}/v1/sessions/{session['session']}/finish", json={"reward": 1.0})
            return turns

    turns = served(house, agent)
    made = group(house)
    assert len(house.engines_own) == turns
    assert sum(t.sampled for t in made.trajectories) == sum(len(answer.tokens) for answer in house.engines_own)
    return made


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents_calls_tools_in_parallel(
    tokenizers: dict[bool, Path], model: Any, api: str, streaming: bool
) -> None:
    agents.set_tracing_disabled(True)
    revealed = []

    @agents.function_tool
    def reveal(letters: str) -> str:
        """Shows them."""
        revealed.append(letters)
        return "a"

    def done(_context: Any, results: list[Any]) -> agents.ToolsToFinalOutputResult:
        return agents.ToolsToFinalOutputResult(is_final_output=len(revealed) >= 4, final_output="done")

    async def play(url: str) -> int:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
            agent = agents.Agent("sorter", model=kind("policy", client), tools=[reveal], tool_use_behavior=done)
            if streaming:
                result = agents.Runner.run_streamed(agent, "ba")
                assert [event async for event in result.stream_events()]
                assert result.final_output == "done"
            else:
                assert (await agents.Runner.run(agent, "ba")).final_output == "done"
        return 2

    made = played(House(tokenizers[True], model, tool_calls=TWICE), play)
    assert [len(t.turns) for t in made.trajectories] == [2] and len(revealed) == 4


def test_openai_agents_with_a_sub_agent(tokenizers: dict[bool, Path], model: Any) -> None:
    """A sub-agent's conversation is a branch of its own, with the session's reward."""
    agents.set_tracing_disabled(True)

    async def play(url: str) -> int:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            policy = agents.OpenAIResponsesModel("policy", client)
            helper = agents.Agent("helper", model=policy).as_tool("helper", "Helps.")
            boss = agents.Agent("boss", model=policy, tools=[helper], tool_use_behavior="stop_on_first_tool")
            await agents.Runner.run(boss, "ba")
        return 2

    made = played(House(tokenizers[True], model, tool_calls=ASKS), play)
    assert [len(t.turns) for t in made.trajectories] == [1, 1]
    assert [float(t.rewards.sum()) for t in made.trajectories] == [1.0, 1.0]


@pytest.mark.parametrize("streaming", [False, True])
def test_pydantic_ai_compacts_its_history(tokenizers: dict[bool, Path], model: Any, streaming: bool) -> None:
    """What is left of a history begins a branch; in each of them a token is trained on once."""

    async def play(url: str) -> int:
        provider = OpenAIProvider(base_url=url, api_key="none")
        agent = pydantic_ai.Agent(OpenAIChatModel("policy", provider=provider))
        if streaming:
            async with agent.run_stream("ba") as first:
                assert isinstance(await first.get_output(), str)
        else:
            first = await agent.run("ba")
        second = await agent.run("a", message_history=first.all_messages())
        await agent.run("b", message_history=second.all_messages()[-2:])
        return 3

    made = played(House(tokenizers[True], model), play)
    assert [len(t.turns) for t in made.trajectories] == [2, 1]


class Talk(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


@pytest.mark.parametrize("streaming", [False, True])
def test_langgraph_calls_tools_in_parallel(tokenizers: dict[bool, Path], model: Any, streaming: bool) -> None:
    revealed = []

    def reveal(letters: str) -> str:
        """Shows them."""
        revealed.append(letters)
        return "a"

    async def play(url: str) -> int:
        policy = ChatOpenAI(model="policy", base_url=url, api_key="none", streaming=streaming).bind_tools([reveal])

        async def ask(state: Talk) -> dict[str, Any]:
            return {"messages": [await policy.ainvoke(state["messages"])]}

        graph = StateGraph(Talk)
        graph.add_node("policy", ask)
        graph.add_node("tools", ToolNode([reveal]))
        graph.set_entry_point("policy")
        graph.add_edge("policy", "tools")
        graph.add_conditional_edges("tools", lambda _: END if len(revealed) >= 4 else "policy")
        await asyncio.wait_for(graph.compile().ainvoke({"messages": [HumanMessage("ba")]}), 30)
        return 2

    made = played(House(tokenizers[True], model, tool_calls=TWICE), play)
    assert [len(t.turns) for t in made.trajectories] == [2] and len(revealed) == 4
