"""Anthropic's messages: what is read of a request, and how a turn is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from penstock.services.gateway.asking import Body, Content, Listed, Never, Stops, TemplateKwargs, content_of
from penstock.services.gateway.chat import about, dumps
from penstock.services.gateway.conversation import Conversation
from penstock.services.gateway.errors import AgentError
from penstock.services.gateway.formats import Form, Wanted
from penstock.services.gateway.pictures import read_part
from penstock.services.gateway.replies import THOUGHTS
from penstock.services.gateway.session import Turn

STOPS = {"stop": "end_turn", "length": "max_tokens"}


class Words(BaseModel):
    """A block of text."""

    model_config = ConfigDict(extra="allow")
    type: Literal["text"]
    text: str


class Thoughts(BaseModel):
    """What a model has thought is not told to it again."""

    model_config = ConfigDict(extra="allow")
    type: Literal["thinking", "redacted_thinking"]


class Picture(BaseModel):
    """A picture, in base64."""

    model_config = ConfigDict(extra="allow")
    type: Literal["image"]
    source: dict[str, Any]

    @field_validator("source")
    @classmethod
    def _is_one(cls, source: dict[str, Any]) -> dict[str, Any]:
        return {"data": read_part({"type": "image", "source": source})["picture"]}


class ToolUse(BaseModel):
    """A call that the policy has asked for."""

    model_config = ConfigDict(extra="allow")
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = {}


class ToolResult(BaseModel):
    """What came of it."""

    model_config = ConfigDict(extra="allow")
    type: Literal["tool_result"]
    tool_use_id: str
    content: Content | None = None
    is_error: bool | None = False


Block = Annotated[Words | Picture | Thoughts | ToolUse | ToolResult, Field(discriminator="type")]


class Said(BaseModel):
    """One message."""

    model_config = ConfigDict(extra="allow")
    role: Literal["user", "assistant", "system"]
    content: str | Listed[Block]


class Tool(BaseModel):
    """A function that the policy may ask for."""

    model_config = ConfigDict(extra="allow")
    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] = {}

    @field_validator("type")
    @classmethod
    def _of_ones_own(cls, kind: str | None) -> str | None:
        if kind not in (None, "custom"):
            raise ValueError(
                f"{kind!r} is a tool of Anthropic's own, which nobody runs here, and whose arguments the policy is not "
                "told of; give it as one of your own, with its input_schema"
            )
        return kind


class CountRequest(Body):
    """``POST /v1/messages/count_tokens``."""

    model_config = ConfigDict(extra="allow")
    messages: Listed[Said] = Field(min_length=1)
    system: Content | None = None
    tools: Listed[Tool] | None = None
    chat_template_kwargs: TemplateKwargs = None
    thread: Any = None
    compaction: Never = None
    mcp_servers: Never = None

    @property
    def talk(self) -> Conversation:
        """As chat completions have it: a tool's result is a message of its own. Raises `AgentError`."""
        return Conversation(self._said(), self._functions(), self.chat_template_kwargs)

    def _said(self) -> list[dict[str, Any]]:
        if self.thread is not None:  # of which each request has the newest messages alone
            raise AgentError(
                400, "unsupported", "thread: conversations are not kept here; send all of its messages",
                details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
            )  # fmt: skip
        found: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for message in self.messages:
            found += _messages(message.role, message.content)
        return found

    def _functions(self) -> list[dict[str, Any]] | None:
        """The tools, as chat templates want them."""
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                },
            }
            for tool in self.tools or ()
        ] or None


class MessagesRequest(CountRequest):
    """``POST /v1/messages``. How tokens are drawn is the run's."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Stops | None = None
    stream: bool | None = False
    output_config: dict[str, Any] | None = None
    tool_choice: dict[str, Any] | None = None

    @field_validator("messages")
    @classmethod
    def _ends_with_a_question(cls, messages: list[Said]) -> list[Said]:
        if messages[-1].role == "assistant":
            raise ValueError("the last one is the assistant's, whose words are the policy's own: it begins no answer")
        return messages

    @property
    def calls(self) -> bool:
        """The answer may ask for tools."""
        return (self.tool_choice or {}).get("type") != "none"

    @property
    def form(self) -> Wanted:
        """That an answer is to have."""
        wanted = (self.output_config or {}).get("format")
        return "output_config.format", wanted if isinstance(wanted, dict) else None


def message(session: str, model: str, turn: Turn, form: Form | None = None) -> dict[str, Any]:
    """The answer, whole."""
    return {
        "id": f"msg_{session}-{turn.number}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": _blocks(turn),
        "stop_reason": _stop(turn),
        "stop_sequence": turn.stopped_by or None,
        "usage": {"input_tokens": turn.prompt_tokens, "output_tokens": len(turn.answer.tokens)},
        "penstock": about(session, [turn], form),
    }


def events(session: str, model: str, turn: Turn, form: Form | None = None) -> Iterator[str]:
    """The answer as server-sent events."""

    def event(kind: str, **rest: Any) -> str:
        return f"event: {kind}\ndata: {dumps({'type': kind, **rest})}\n\n"

    whole = message(session, model, turn, form)
    begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
    begun["usage"] = {**whole["usage"], "output_tokens": 0}
    yield event("message_start", message=begun)
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty: dict[str, Any] = {"type": "text", "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        elif block["type"] == "thinking":
            empty = {**block, "thinking": ""}
            delta = {"type": "thinking_delta", "thinking": block["thinking"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield event("content_block_start", index=index, content_block=empty)
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    stopped = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    yield event("message_delta", delta=stopped, usage={"output_tokens": whole["usage"]["output_tokens"]})
    yield event("message_stop")


def _blocks(turn: Turn) -> list[dict[str, Any]]:
    said = turn.message
    thoughts = said.get(THOUGHTS)
    found: list[dict[str, Any]] = [{"type": "text", "text": said["content"]}] if said["content"] else []
    for call in said.get("tool_calls", ()):
        about = call["function"]
        found.append(
            {"type": "tool_use", "id": call["id"], "name": about["name"], "input": json.loads(about["arguments"])}
        )
    before = [{"type": "thinking", "thinking": thoughts, "signature": ""}] if thoughts else []
    return before + (found or [{"type": "text", "text": ""}])


def _stop(turn: Turn) -> str:
    if turn.message.get("tool_calls"):
        return "tool_use"
    return "stop_sequence" if turn.stopped_by else STOPS[turn.answer.finish]


def _result(block: ToolResult) -> str | list[dict[str, Any]]:
    """What came of a call; where that was an error, it says so."""
    found = block.content or ""
    if not block.is_error:
        return found
    return f"error: {found}" if isinstance(found, str) else [{"type": "text", "text": "error: "}, *found]


def _messages(role: str, content: str | list[Block]) -> list[dict[str, Any]]:
    """One of Anthropic's, which may hold results of several tools."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    found: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
        for block in content
        if isinstance(block, ToolResult)
    ]
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in content
        if isinstance(block, ToolUse)
    ]
    words = content_of([block.model_dump() for block in content if isinstance(block, Words | Picture)])
    if words or calls or not found:
        found.append({"role": role, "content": words, **({"tool_calls": calls} if calls else {})})
    return found
