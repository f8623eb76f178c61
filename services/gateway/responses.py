"""OpenAI's responses: what is read of a request, and how a turn is told."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Self

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, model_validator

from penstock.services.gateway.asking import Body, Listed, Never, TemplateKwargs, Told, Tool, plain
from penstock.services.gateway.chat import about, dumps
from penstock.services.gateway.conversation import Conversation
from penstock.services.gateway.errors import AgentError, what_is_wrong
from penstock.services.gateway.formats import Form, Wanted
from penstock.services.gateway.replies import THOUGHTS, Replies
from penstock.services.gateway.session import Said, Session, Turn
from penstock.services.gateway.turn_names import turn_of_id

LOGPROBS = "message.output_text.logprobs"
"""In ``include``: what `openai` calls them."""


def _whole(value: Any) -> Any:
    if value not in (None, "disabled"):
        raise ValueError("nothing is taken out of a conversation here; leave it out, and shorten what you send")
    return value


class ResponsesRequest(Body):
    """``POST /v1/responses``. How tokens are drawn is the run's."""

    model_config = ConfigDict(extra="allow")
    input: str | Listed[dict[str, Any]]
    instructions: str | None = None
    """The system's message; takes the place of the one that a ``previous_response_id`` brings along."""
    previous_response_id: str | None = None
    tools: Listed[dict[str, Any]] | None = None
    chat_template_kwargs: TemplateKwargs = None
    max_output_tokens: int | None = Field(None, ge=1)
    include: Listed[str] | None = None
    text: dict[str, Any] | None = None
    stream: bool | None = False
    conversation: Never = None
    prompt: Never = None
    background: Never = None
    context_management: Never = None
    truncation: Annotated[Any, AfterValidator(_whole)] = None
    tool_choice: Any = None

    @model_validator(mode="after")
    def _can_be_told_again(self) -> Self:
        """What the answer repeats: JSON can say what UTF-8 cannot, and Python's more than JSON."""
        for name in ("instructions", "tools", "text"):
            try:
                json.dumps(getattr(self, name), ensure_ascii=False, allow_nan=False).encode()
            except (ValueError, RecursionError):
                raise ValueError(f"{name}: it has NaN, half a character, or is nested too deep") from None
        return self

    @property
    def calls(self) -> bool:
        """The answer may ask for tools."""
        return self.tool_choice != "none"

    def _functions(self) -> list[dict[str, Any]] | None:
        """The tools, as chat templates want them. Raises `AgentError` for those that the policy cannot ask for."""
        found = []
        for tool in self.tools or ():
            inner = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
            try:
                made = Tool.model_validate({"type": tool.get("type"), "function": inner})
            except ValidationError as error:
                raise AgentError(
                    400, "unsupported", f"tools: only functions, by name: {what_is_wrong(error.errors())}"
                ) from None
            found.append(made.model_dump(exclude_none=True))
        return found or None

    @property
    def form(self) -> Wanted:
        """That an answer is to have. Raises `AgentError`."""
        wanted = (self.text or {}).get("format")
        if wanted is not None and not isinstance(wanted, dict):
            raise AgentError(422, "invalid_request", "text.format: not an object")
        return "text.format", wanted

    def talk(self, session_id: str, session: Session) -> Conversation:
        """As chat completions have it. Raises `AgentError`."""
        return Conversation(self._said(session_id, session), self._functions(), self.chat_template_kwargs)

    def _said(self, session_id: str, session: Session) -> list[dict[str, Any]]:
        before = _before(self.previous_response_id, session_id, session)
        if self.instructions is not None:
            told = before[0] if before and before[0].get("role") == "system" else None
            rest = before[1:] if told and session.was_instructed(told["content"]) else before
            before = [{"role": "system", "content": self.instructions}, *rest]
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        said = [*before, *_messages(_looked_up(items, session_id, session))]
        if not said:
            raise AgentError(422, "invalid_request", "input: nothing is asked")
        return said


def _before(id: str | None, session_id: str, session: Session) -> Said:
    if id is None:
        return []
    turn = turn_of_id(id, "resp_", session_id, session)
    if turn is None:
        raise AgentError(404, "previous_response_not_found", f"previous_response_id: {id!r} is none of this session's")
    return list(turn.said)


def _looked_up(items: Sequence[dict[str, Any]], session_id: str, session: Session) -> Iterator[dict[str, Any]]:
    """``items``, those that are named by their ids alone written out; what is referred to is a turn's answer, which
    several of its items name. Raises `AgentError`."""
    for index, item in enumerate(items):
        if item.get("type") != "item_reference" and item.keys() != {"id"}:
            yield item
            continue
        name = str(item.get("id"))
        if name.startswith("rs_"):  # what was thought is not told again
            continue
        of_call, _, place = name.rpartition("-")
        turn, call = turn_of_id(name, "msg_", session_id, session), turn_of_id(of_call, "fc_", session_id, session)
        found = _call(call, place) if call else _words(turn) if turn else None
        if found is None:
            raise AgentError(404, "item_not_found", f"input.{index}: {name[:80]!r} is no item of this session's")
        yield found


def _words(turn: Turn) -> dict[str, Any]:
    return {"role": "assistant", "content": turn.message["content"]}


def _call(turn: Turn, place: str) -> dict[str, Any] | None:
    """One of the calls of a turn, by its ``place``; None where there is none."""
    calls = turn.message.get("tool_calls", ())
    if not place.isdigit() or int(place) >= len(calls):
        return None
    call = calls[int(place)]
    return {"type": "function_call", "call_id": call["id"], **call["function"]}


def _messages(items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A message for each; the calls of one answer are one message's, with the words before them."""
    found: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "reasoning":  # what was thought is not told again
            continue
        if kind == "function_call":
            if not found or found[-1].get("role") != "assistant":
                found.append({"role": "assistant", "content": ""})
            about_it = {"name": item.get("name"), "arguments": item.get("arguments")}
            found[-1].setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": about_it})
        elif kind == "function_call_output":
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind == "message":
            found.append({"role": item.get("role"), "content": item.get("content")})
        else:
            raise AgentError(400, "unsupported", f"input.{index}: an item of type {kind!r} is not read here")
    try:
        return plain([Told.model_validate(message) for message in found])
    except ValidationError as error:
        raise AgentError(422, "invalid_request", f"input: {what_is_wrong(error.errors())}") from None


def response(
    session: str, model: str, turn: Turn, replies: Replies, asked: ResponsesRequest, form: Form | None = None
) -> dict[str, Any]:
    """The answer, whole."""
    short = turn.answer.finish == "length" and not turn.message.get("tool_calls")  # a call is whole, or none
    size = len(turn.answer.tokens)
    return {
        **_head(session, model, turn, asked),
        "status": "incomplete" if short else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if short else None,
        "output": _items(session, turn, replies, asked),
        "usage": {
            "input_tokens": turn.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": size,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": turn.prompt_tokens + size,
        },
        "penstock": about(session, [turn], form),
    }


def events(
    session: str, model: str, turn: Turn, replies: Replies, asked: ResponsesRequest, form: Form | None = None
) -> Iterator[str]:
    """The answer as server-sent events."""
    whole = response(session, model, turn, replies, asked, form)
    begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    told: list[dict[str, Any]] = [
        {"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")
    ]
    for index, item in enumerate(whole["output"]):
        told += _events_of(index, item)
    told.append({"type": f"response.{whole['status']}", "response": whole})
    for number, event in enumerate(told):
        yield f"event: {event['type']}\ndata: {dumps({**event, 'sequence_number': number})}\n\n"


def _events_of(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    where = {"output_index": index, "item_id": item["id"]}
    if item["type"] == "message":
        empty, (part,) = {**item, "status": "in_progress", "content": []}, item["content"]
        place, blank = {**where, "content_index": 0}, {**part, "text": "", "logprobs": []}
        body = [
            {"type": "response.content_part.added", **place, "part": blank},
            {"type": "response.output_text.delta", **place, "delta": part["text"], "logprobs": part["logprobs"]},
            {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": part["logprobs"]},
            {"type": "response.content_part.done", **place, "part": part},
        ]
    elif item["type"] == "reasoning":
        empty, (part,) = {**item, "status": "in_progress", "content": []}, item["content"]
        place = {**where, "content_index": 0}
        body = [
            {"type": "response.reasoning_text.delta", **place, "delta": part["text"]},
            {"type": "response.reasoning_text.done", **place, "text": part["text"]},
        ]
    else:
        empty, arguments = {**item, "status": "in_progress", "arguments": ""}, item["arguments"]
        done = {**where, "name": item["name"], "arguments": arguments}
        body = [
            {"type": "response.function_call_arguments.delta", **where, "delta": arguments},
            {"type": "response.function_call_arguments.done", **done},
        ]
    yield {"type": "response.output_item.added", "output_index": index, "item": empty}
    yield from body
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _items(session: str, turn: Turn, replies: Replies, asked: ResponsesRequest) -> list[dict[str, Any]]:
    message, name = turn.message, f"{session}-{turn.number}"
    calls = message.get("tool_calls", ())
    found: list[dict[str, Any]] = []
    if thoughts := message.get(THOUGHTS):
        parts = [{"type": "reasoning_text", "text": thoughts}]
        found.append({"id": f"rs_{name}", "type": "reasoning", "status": "completed", "summary": [], "content": parts})
    if message["content"] or not calls:
        logprobs = replies.logprobs(turn.answer) if LOGPROBS in (asked.include or ()) else []
        text = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": logprobs}
        about_it = {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": "completed"}
        found.append({**about_it, "content": [text]})
    for index, call in enumerate(calls):
        about_it = {"id": f"fc_{name}-{index}", "type": "function_call", "call_id": call["id"], "status": "completed"}
        found.append({**about_it, **call["function"]})
    return found


def _head(session: str, model: str, turn: Turn, asked: ResponsesRequest) -> dict[str, Any]:
    """What a request said of itself, and the answer's name."""
    return {
        "id": f"resp_{session}-{turn.number}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": asked.previous_response_id,
        "temperature": None,
        "text": asked.text or {"format": {"type": "text"}},
        "tool_choice": "auto" if asked.calls else "none",
        "tools": asked.tools or [],
        "top_p": None,
        "truncation": "disabled",
    }
