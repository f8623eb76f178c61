"""An agent with a tool, in the unmodified `openai` client: trained while it plays. See configs/agent.yaml.

python examples/agent_openai.py runs/agent           # --turns: what the call was worth is said of the call's turn
"""

from __future__ import annotations

import asyncio
import json
import random
import sys

from openai import AsyncOpenAI

import penstock

TOOL = {
    "type": "function",
    "function": {
        "name": "reveal",
        "description": "Shows all letters, if it is called with exactly those that can be seen.",
        "parameters": {"type": "object", "properties": {"letters": {"type": "string"}}, "required": ["letters"]},
    },
}


async def play(model: AsyncOpenAI, session: penstock.AsyncAgentSession) -> float:
    """Plays a session over ``model``; returns its reward: a third for a right call, all of it for the right answer.
    With ``--turns`` the third is the call's own, and what is returned is the rest."""
    task, by_turn = session.task, "--turns" in sys.argv
    letters = list(task.truth)
    random.Random(task.index).shuffle(letters)
    shown = letters[: max(1, len(letters) // 2)]
    messages = [{"role": "user", "content": f"sort {''.join(shown)}="}]
    first = await model.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
    said = first.choices[0].message
    if not said.tool_calls:
        return 0.0
    call = said.tool_calls[0]
    if sorted(json.loads(call.function.arguments)["letters"]) != sorted(shown):
        return 0.0
    if by_turn:
        await session.reward(1 / 3, turn=first.id)
    messages += [said, {"role": "tool", "tool_call_id": call.id, "content": f"sort {''.join(letters)}="}]
    second = await model.chat.completions.create(
        model="policy", messages=messages, tools=[TOOL], stream="--stream" in sys.argv
    )
    if "--stream" in sys.argv:
        parts = [chunk.choices[0].delta.tool_calls async for chunk in second if chunk.choices]
        answer = "".join(part.function.arguments or "" for calls in parts if calls for part in calls)
    else:
        answer = second.choices[0].message.tool_calls[0].function.arguments
    right = json.loads(answer)["letters"] == task.truth
    return (2 / 3 if right else 0.0) if by_turn else (1.0 if right else 1 / 3)


async def work(client: penstock.AsyncAgentClient) -> None:
    """One task after the other, until the run is over."""
    while True:
        try:
            session = await client.session(wait_s=300)
            async with session, AsyncOpenAI(base_url=session.base_url, api_key="none", max_retries=10) as model:
                await session.finish(reward=await play(model, session))
        except penstock.RunOver:
            return


async def main(run: str, at_once: int = 64) -> None:
    async with penstock.AsyncAgentClient(run) as client, asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work(client))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
