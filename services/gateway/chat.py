"""OpenAI's chat completions: what is read of a request, and how turns are told."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import Field, field_validator

from penstock.services.gateway.asking import Listed, Never, Several, TemplateKwargs, Told, Tool, plain
from penstock.services.gateway.conversation import Conversation
from penstock.services.gateway.formats import Form, Wanted
from penstock.services.gateway.replies import THOUGHTS, Replies
from penstock.services.gateway.session import Turn


class ChatRequest(Several):
    """``POST /v1/chat/completions``. How tokens are drawn is the run's: ``temperature``, ``top_p`` and their like are
    read by nobody."""

    messages: Listed[Told] = Field(min_length=1)
    tools: Listed[Tool] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    response_format: dict[str, Any] | None = None
    functions_: Never = Field(None, alias="functions")
    function_call: Never = None
    tool_choice: Any = None
    continue_final_message: Never = None
    modalities: list[str] | None = None
    audio: Never = None
    web_search_options: Never = None
    chat_template_kwargs: TemplateKwargs = None

    @field_validator("modalities")
    @classmethod
    def _in_text(cls, kinds: list[str] | None) -> list[str] | None:
        if set(kinds or ()) - {"text"}:
            raise ValueError("the policy answers in text; leave the others out")
        return kinds

    @property
    def calls(self) -> bool:
        """The answer may ask for tools."""
        return self.tool_choice != "none"

    @property
    def most(self) -> int | None:
        """Tokens of an answer."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def form(self) -> Wanted:
        """That an answer is to have."""
        return "response_format", self.response_format

    @property
    def talk(self) -> Conversation:
        """As chat templates want it."""
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()] or None
        return Conversation(plain(self.messages), tools, self.chat_template_kwargs)


def completion(
    session: str, model: str, turns: Sequence[Turn], replies: Replies, asked: ChatRequest, form: Form | None = None
) -> dict[str, Any]:
    """The answer, whole. ``penstock`` says which turns these are, and of which versions."""
    choices = []
    for index, turn in enumerate(turns):
        message = {"refusal": None, **turn.message, "content": turn.message["content"] or None, **thoughts_of(turn)}
        choices.append(
            {
                "index": index,
                "message": message,
                "finish_reason": finish_of(turn),
                "logprobs": _logprobs(turn, replies, asked),
            }
        )
    return {
        **_about(session, model, turns, "chat.completion"),
        "choices": choices,
        "usage": usage(turns),
        "penstock": about(session, turns, form),
    }


def chunks(
    session: str, model: str, turns: Sequence[Turn], replies: Replies, asked: ChatRequest, form: Form | None = None
) -> Iterator[str]:
    """The answer as server-sent events."""
    head = _about(session, model, turns, "chat.completion.chunk")
    return streamed(head, _choices(turns, replies, asked), session, turns, asked, form)


def streamed(
    head: dict[str, Any],
    choices: Iterable[dict[str, Any]],
    session: str,
    turns: Sequence[Turn],
    asked: Several,
    form: Form | None = None,
) -> Iterator[str]:
    """Server-sent events, each with the ``head`` and one of the ``choices``; the last says what the whole answer says
    beside them."""
    said = [{**head, "choices": [choice]} for choice in choices]
    if (asked.stream_options or {}).get("include_usage"):
        said.append({**head, "choices": [], "usage": usage(turns)})
    said[-1]["penstock"] = about(session, turns, form)
    yield from (f"data: {dumps(each)}\n\n" for each in said)
    yield "data: [DONE]\n\n"


def _choices(turns: Sequence[Turn], replies: Replies, asked: ChatRequest) -> Iterator[dict[str, Any]]:
    """Of a stream, in its order."""

    def choice(index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}

    for index, turn in enumerate(turns):
        said = {"role": "assistant", "content": turn.message["content"], **thoughts_of(turn)}
        yield choice(index, said, logprobs=_logprobs(turn, replies, asked))
        for place, call in enumerate(turn.message.get("tool_calls", ())):
            yield choice(index, {"tool_calls": [{"index": place, **call}]})
        yield choice(index, {}, finish_of(turn))


def _logprobs(turn: Turn, replies: Replies, asked: ChatRequest) -> dict[str, Any] | None:
    return {"content": replies.logprobs(turn.answer), "refusal": None} if asked.logprobs else None


def thoughts_of(turn: Turn) -> dict[str, str]:
    """What the policy has only thought, where that is told apart: by both names that clients look for."""
    thoughts = turn.message.get(THOUGHTS)
    return {THOUGHTS: thoughts, "reasoning": thoughts} if thoughts else {}


def finish_of(turn: Turn) -> str:
    """In OpenAI's words."""
    return "tool_calls" if turn.message.get("tool_calls") else turn.answer.finish


def usage(turns: Sequence[Turn]) -> dict[str, int]:
    """Tokens."""
    prompt = turns[0].prompt_tokens
    said = sum(len(turn.answer.tokens) for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}


def about(session: str, turns: Sequence[Turn], form: Form | None = None) -> dict[str, Any]:
    """Which turns of which versions these are; and whether each answer has the form that was asked for."""
    versions = [int(v) for turn in turns for v in (turn.answer.versions.min(), turn.answer.versions.max())]
    found = {"session": session, "turns": [t.number for t in turns], "versions": [min(versions), max(versions)]}
    return found if form is None else {**found, "fits": form.fits}


def dumps(value: Any) -> str:
    """JSON in one line."""
    return json.dumps(value, separators=(",", ":"))


def _about(session: str, model: str, turns: Sequence[Turn], kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{session}-{turns[0].number}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }
