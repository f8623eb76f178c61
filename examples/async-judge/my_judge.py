"""A reward that asks another model, and one that is only arithmetic."""

import asyncio
import os
import re

import httpx

URL = os.environ.get("JUDGE_URL", "http://127.0.0.1:8123/v1")
MODEL = os.environ.get("JUDGE_MODEL", "judge")
ASK = "Task: {prompt}\nAnswer: {response}\nHow good is the answer, from 0 to 10? Reply with the number alone."

# One client for all calls: they run in one event loop. httpx opens 100 connections unless told otherwise, and searches
# all those that it keeps at every call: with hundreds kept a call takes 20 ms of CPU, with 20 it takes 3 ms.
client = httpx.AsyncClient(
    base_url=URL, timeout=25, limits=httpx.Limits(max_connections=256, max_keepalive_connections=20)
)


async def judge(response: str, prompt: str) -> float:
    """The judge's mark, between 0 and 1. A reply without a number raises, and costs this answer alone."""
    said = {"model": MODEL, "messages": [{"role": "user", "content": ASK.format(prompt=prompt, response=response)}]}
    for wait in (0.5, 2.0, 8.0):
        reply = await client.post("/chat/completions", json=said)
        if reply.status_code != httpx.codes.TOO_MANY_REQUESTS:
            break
        await asyncio.sleep(wait)
    reply.raise_for_status()
    text = reply.json()["choices"][0]["message"]["content"]
    number = re.search(r"\d+(\.\d+)?", text)
    if number is None:
        raise ValueError(f"the judge gave no number: {text[:80]!r}")
    return min(float(number.group()), 10.0) / 10


def brief(response: str, finish_reason: str) -> float:
    """Nothing for an answer that was cut off."""
    return 0.0 if finish_reason == "length" else 1.0 / (1 + len(response))
