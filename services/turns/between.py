"""What a chat template puts between an answer and the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from penstock.services.modeling.answer_end import MARK
from penstock.services.turns.beside import in_json
from penstock.services.turns.calls_told import Message, marked_calls

MOST_KEPT = 256
"""Lists of tools of which it is known."""

Tools = Sequence[Mapping[str, Any]]
Render = Callable[[Sequence[Message], "Tools | None"], str]
"""A chat that is told of tools, up to where the next answer begins. Some tokenizers have one template for chats with
tools and another for those without."""


def behind_answer(render: Render, messages: Sequence[Message], tools: Tools | None) -> str | None:
    """What stands behind an answer: its end, ``messages``, and the beginning of the next one. None where the template
    leaves out what the assistant said."""
    _, found, text = _told(render, {"role": "assistant", "content": MARK}, messages, tools).partition(MARK)
    return text if found else None


def behind_calls(
    render: Render, calls: Sequence[Mapping[str, Any]], messages: Sequence[Message], ends: Sequence[Iterable[str]],
    tools: Tools | None,
) -> str:  # fmt: skip
    """As `behind_answer`, of an answer that asked for tools: some templates say of a result whose it is. A call ends
    first, as was sampled, and then the answer, by the first of one of ``ends``, of which the earlier are looked for
    before the others. Empty where the template says nothing of calls."""
    marks, marked = marked_calls(calls)
    try:
        told = _told(render, {"role": "assistant", "content": MARK, "tool_calls": marked}, messages, tools)
    except Exception:  # a template may raise anything; what it says of an answer without calls may do
        return ""
    last = next((mark for mark in reversed(marks) if mark in told), None)  # some tell of the first call alone
    begun = told.index(last) if last else len(told)
    for each in ends:
        found = [at for end in each if end and (at := told.find(end, begun)) >= 0]
        if found:
            return told[min(found) :]
    return ""


def lost_call(render: Render, answer: Message, tools: Tools | None) -> str:
    """The function of a call in ``answer`` that the chat template says nothing of; empty: it tells of all."""
    marks, marked = marked_calls(answer.get("tool_calls") or ())
    told = _told(render, {**answer, "tool_calls": marked}, (), tools) if marks else ""
    return next((call["function"]["name"] for mark, call in zip(marks, marked, strict=True) if mark not in told), "")


class ToldAgain:
    """Whether the template tells of tools before a user's newest words, as Mistral's do: they were told before. What it
    found is kept: agents name the same tools with each turn."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._known: dict[str, bool] = {}

    def __call__(self, tools: Tools) -> bool:
        key = in_json(tools)
        if key not in self._known:
            if len(self._known) >= MOST_KEPT:
                self._known.clear()
            behind = behind_answer(self._render, [{"role": "user", "content": "?"}], tools) or ""
            names = [str((tool.get("function") or {}).get("name") or "") for tool in tools]
            self._known[key] = any(name and name in behind for name in names)
        return self._known[key]


def next_words(answer: Message) -> list[Message]:
    """What may stand behind an ``answer``: what its tools gave, or else a user's words."""
    calls = answer.get("tool_calls") or ()
    results: list[Message] = [{"role": "tool", "content": "7", "tool_call_id": call.get("id")} for call in calls]
    return results or [{"role": "user", "content": "?"}]


def _told(render: Render, answer: Message, messages: Sequence[Message], tools: Tools | None) -> str:
    """A chat with an ``answer``, and ``messages`` behind it, up to where the next one begins."""
    return render([{"role": "user", "content": "?"}, answer, *messages], tools)
