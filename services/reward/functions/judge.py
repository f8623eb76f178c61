"""A remote judge: a model behind an OpenAI-compatible server that is asked for a grade."""

import asyncio
import hashlib
import json
import os
import random
import re
import time
from collections import OrderedDict
from email.utils import parsedate_to_datetime
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
_NUMBER = r"\d+(?:[.,]\d+)?"
_TO = rf"\s*(?:-|\u2013|to)\s*{_NUMBER}"
_BEGINS = r"(?<![A-Za-z0-9])(?<!\d[.,])"
"""Of a number that is no part of another one, nor of a Latin word: other scripts leave no spaces."""
PATTERN = (
    rf"(?:/|(?:out|scale) of(?: a possible)?)[\s*]*{_NUMBER}(?:{_TO})?"
    rf"|{_BEGINS}[01]{_TO}"
    rf"|({_BEGINS}-?{_NUMBER})(?:[\s*]*of(?: a possible)?[\s*]*{_NUMBER})?"
)
"""A number. The scale is no grade: what stands behind "/" or "out of", or behind a number and "of", and "0-10"."""
REMEMBERED = 65536
"""Grades that are kept: the same question is not asked twice."""
KEPT_CONNECTIONS = 20
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
"""Of the waits that the judge has not asked for."""
_grades: OrderedDict[bytes, float] = OrderedDict()
"""By the digest of the address, of what it is asked with, which may be long, and of how the grade is read."""
_under_way: dict[bytes, asyncio.Task[None]] = {}
"""Questions that are being asked: who has the same waits for that answer."""


class JudgeError(RuntimeError):
    """The judge gave no grade; says what it said instead."""


@cache
def _client() -> Any:
    need("httpx", "http", "reward.functions")
    import httpx

    # A call's deadline is `timeout_s`; how many are under way, `reward.concurrency`. httpx searches all that it keeps.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=KEPT_CONNECTIONS)
    return httpx.AsyncClient(timeout=None, limits=limits)


async def judge(
    response: str,
    prompt: str,
    truth: Any,
    url: str,
    model: str,
    question: str = QUESTION,
    pattern: str = PATTERN,
    scale: float = 10.0,
    key_env: str = "OPENAI_API_KEY",
    attempts: int = 6,
    max_tokens: int = 512,
    body: dict[str, Any] | None = None,
) -> float:
    """The last number of the judge's reply that ``pattern`` finds (its first group, where it has one; what that does
    not match is passed over), divided by ``scale``. By default the last that is not the 10 of ``7/10``, ``7 out of
    10``, ``7 of 10`` or ``0-10``. One outside 0 to ``scale`` is no grade, nor is one in a reply that ``max_tokens`` has
    cut off.

    ``url`` is the server's base, e.g. ``http://judge:8000/v1``; ``question`` has ``{prompt}``, ``{truth}`` and
    ``{response}``; the variable ``key_env`` holds a key, if one is needed. ``body`` is put over what it is asked
    with (``temperature`` 0, ``max_tokens``), and takes out what it says is None. A busy or failing server (429, 5xx, a
    broken connection) is asked again up to ``attempts`` times, each after twice as long, or after what it asks for. The
    same question has the same grade, and is asked once.
    """
    parts = {"prompt": prompt, "truth": "none" if truth is None else str(truth), "response": response}
    text = re.sub(r"\{(prompt|truth|response)\}", lambda found: parts[found[1]], question)
    said = {"model": model, "temperature": 0.0, "max_tokens": max_tokens}
    said |= {"messages": [{"role": "user", "content": text}]} | (body or {})
    said = {name: value for name, value in said.items() if value is not None}
    key = hashlib.sha256(json.dumps([url, said, pattern, scale]).encode()).digest()
    while key not in _grades:
        if asked := _under_way.get(key):
            await asyncio.wait([asked])
            if not asked.cancelled():  # else whoever asked was at its deadline: now it is for us to ask
                asked.result()
            continue
        asking = _grade(key, url, said, pattern, scale, key_env, attempts)
        asked = _under_way[key] = asyncio.ensure_future(asking)
        asked.add_done_callback(lambda _: _under_way.pop(key))
        await asked
    _grades.move_to_end(key)
    return _grades[key] / scale


async def _grade(
    key: bytes, url: str, body: dict[str, Any], pattern: str, scale: float, key_env: str, attempts: int
) -> None:
    """Asks, and remembers the grade."""
    reply = await _ask(f"{url.rstrip('/')}/chat/completions", body, os.environ.get(key_env, ""), attempts)
    groups = (found[0] if isinstance(found, tuple) else found for found in re.findall(pattern, reply))
    said = [found for found in groups if found]
    if not said:
        raise JudgeError(f"no grade in its reply: {reply[:120]!r}")
    grade = float(said[-1].replace(",", "."))
    if not 0 <= grade <= scale:
        raise JudgeError(f"{grade:g} is no grade from 0 to scale={scale:g}, in its reply: {reply[:120]!r}")
    _grades[key] = grade
    while len(_grades) > REMEMBERED:
        _grades.popitem(last=False)


async def _ask(url: str, body: dict[str, Any], key: str, attempts: int) -> str:
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    wait_s = FIRST_WAIT_S
    for attempt in range(1, attempts + 1):
        asked_s = 0.0
        try:
            answer = await _client().post(url, json=body, headers=headers)
            if answer.status_code == 200:
                return _content(answer)
            said = f"{answer.status_code}: {answer.text[:120]!r}"
            asked_s = _seconds(answer.headers.get("Retry-After", ""))
            if answer.status_code != 429 and answer.status_code < 500:
                raise JudgeError(f"{url} answered {said}")
        except httpx.TransportError as error:
            said = f"{type(error).__name__}: {error}"
        if attempt == attempts:
            raise JudgeError(f"{url} failed {attempts} times, the last time with {said}")
        await asyncio.sleep(max(asked_s, min(LONGEST_WAIT_S, wait_s * random.uniform(0.75, 1.25))))
        wait_s *= 2
    raise AssertionError


def _seconds(retry_after: str) -> float:
    """That it asks to wait, as seconds or as a date; 0 where it says neither."""
    if re.fullmatch(r"\d+(?:\.\d*)?", retry_after):
        return float(retry_after)
    try:
        return parsedate_to_datetime(retry_after).timestamp() - time.time()
    except ValueError:
        return 0.0


def _content(answer: Any) -> str:
    try:
        choice = answer.json()["choices"][0]
        content, finish = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise JudgeError(f"its answer is no chat completion: {answer.text[:120]!r}") from None
    if finish == "length":
        raise JudgeError(
            "its reply was cut off before the grade; raise the option max_tokens (in body max_completion_tokens), or "
            f"ask one that does not think: {str(content)[-120:]!r}"
        )
    if not isinstance(content, str):
        raise JudgeError(f"its answer has no text: {answer.text[:120]!r}")
    return content
