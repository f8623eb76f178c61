"""A remote judge: a model behind an OpenAI-compatible server that is asked for a grade."""

import asyncio
import hashlib
import json
import os
import re
from collections import OrderedDict
from typing import Any

from penstock.services.runtime.asking import AskingError, ask

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
_grades: OrderedDict[bytes, float] = OrderedDict()
"""By the digest of the address, of what it is asked with, which may be long, and of how the grade is read."""
_under_way: dict[bytes, asyncio.Task[None]] = {}
"""Questions that are being asked: who has the same waits for that answer."""


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
    secret = os.environ.get(key_env, "")
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    reply = _content(await ask(f"{url.rstrip('/')}/chat/completions", body, attempts, headers))
    groups = (found[0] if isinstance(found, tuple) else found for found in re.findall(pattern, reply))
    said = [found for found in groups if found]
    if not said:
        raise AskingError(f"no grade in its reply: {reply[:120]!r}")
    grade = float(said[-1].replace(",", "."))
    if not 0 <= grade <= scale:
        raise AskingError(f"{grade:g} is no grade from 0 to scale={scale:g}, in its reply: {reply[:120]!r}")
    _grades[key] = grade
    while len(_grades) > REMEMBERED:
        _grades.popitem(last=False)


def _content(answer: Any) -> str:
    try:
        choice = answer.json()["choices"][0]
        content, finish = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise AskingError(f"its answer is no chat completion: {answer.text[:120]!r}") from None
    if finish == "length":
        raise AskingError(
            "its reply was cut off before the grade; raise the option max_tokens (in body max_completion_tokens), or "
            f"ask one that does not think: {str(content)[-120:]!r}"
        )
    if not isinstance(content, str):
        raise AskingError(f"its answer has no text: {answer.text[:120]!r}")
    return content
