"""A remote judge: a model behind an OpenAI-compatible server that is asked for a grade."""

import asyncio
import os
import random
import re
from collections import OrderedDict
from functools import cache
from typing import Any

from penstock.services.data import need

QUESTION = """Grade an answer to a task, from 0 (useless) to 10 (perfect).

Task:
{prompt}

Reference:
{truth}

Answer:
{response}

Reply with the grade alone, a number from 0 to 10."""
REMEMBERED = 65536
"""Grades that are kept: the same question is not asked twice."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
_grades: OrderedDict[tuple[str, str, str], float] = OrderedDict()


class JudgeError(RuntimeError):
    """The judge gave no grade; says what it said instead."""


@cache
def _client() -> Any:
    need("httpx", "http", "reward.functions")
    import httpx

    # A call's deadline is `timeout_s`; how many are under way, `reward.concurrency`.
    return httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))


async def judge(
    response: str,
    prompt: str,
    truth: Any,
    url: str,
    model: str,
    question: str = QUESTION,
    pattern: str = r"-?\d+(?:\.\d+)?",
    scale: float = 10.0,
    key_env: str = "OPENAI_API_KEY",
    attempts: int = 6,
    max_tokens: int = 512,
) -> float:
    """The last number of the judge's reply that ``pattern`` finds (its first group, where it has one), divided by
    ``scale``.

    ``url`` is the server's base, e.g. ``http://judge:8000/v1``; ``question`` has ``{prompt}``, ``{truth}`` and
    ``{response}``; the variable ``key_env`` holds a key, if one is needed. A busy or failing server (429, 5xx, a broken
    connection) is asked again up to ``attempts`` times, each after twice as long, or after what it asks for. The same
    question has the same grade, and is asked once.
    """
    text = question.replace("{prompt}", prompt).replace("{truth}", str(truth)).replace("{response}", response)
    key = (url, model, text)
    if key in _grades:
        _grades.move_to_end(key)
        return _grades[key] / scale
    body = {
        "model": model, "temperature": 0.0, "max_tokens": max_tokens, "messages": [{"role": "user", "content": text}]
    }  # fmt: skip
    reply = await _ask(f"{url.rstrip('/')}/chat/completions", body, os.environ.get(key_env, ""), attempts)
    found = re.findall(pattern, reply)
    if not found:
        raise JudgeError(f"no grade in its reply: {reply[:120]!r}")
    last = found[-1][0] if isinstance(found[-1], tuple) else found[-1]
    _grades[key] = float(last)
    while len(_grades) > REMEMBERED:
        _grades.popitem(last=False)
    return _grades[key] / scale


async def _ask(url: str, body: dict[str, Any], key: str, attempts: int) -> str:
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    wait_s = FIRST_WAIT_S
    for attempt in range(1, attempts + 1):
        retry_after = None
        try:
            answer = await _client().post(url, json=body, headers=headers)
            if answer.status_code == 200:
                return _content(answer)
            said = f"{answer.status_code}: {answer.text[:120]!r}"
            retry_after = answer.headers.get("Retry-After")
            if answer.status_code != 429 and answer.status_code < 500:
                raise JudgeError(f"{url} answered {said}")
        except httpx.TransportError as error:
            said = f"{type(error).__name__}: {error}"
        if attempt == attempts:
            raise JudgeError(f"{url} failed {attempts} times, the last time with {said}")
        asked = float(retry_after) if retry_after and retry_after.isdigit() else 0.0
        await asyncio.sleep(min(LONGEST_WAIT_S, max(asked, wait_s * random.uniform(0.75, 1.25))))
        wait_s *= 2
    raise AssertionError


def _content(answer: Any) -> str:
    try:
        content = answer.json()["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError):
        raise JudgeError(f"its answer is no chat completion: {answer.text[:120]!r}") from None
    if not isinstance(content, str):
        raise JudgeError(f"its answer has no text: {answer.text[:120]!r}")
    return content
