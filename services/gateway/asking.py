"""What the requests of all APIs share: which parts of a message the policy reads, and what it is not asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)

from penstock.protocols.chat import as_template_kwargs
from penstock.protocols.messages.base import MOST_WRONG
from penstock.services.gateway.pictures import IMAGES, read_part

TEXT = {"text", "input_text", "output_text", "refusal"}
UNREAD = {"thinking", "redacted_thinking", "reasoning"}
"""What a model has thought is not told to it again."""


Item = TypeVar("Item")
Listed = Annotated[list[Item], Field(fail_fast=True)]
"""A list that is not looked at behind the first item that is wrong."""


class Body(BaseModel):
    """What a request says. Where too much is wrong with it that is only counted: all is told in the gateway's one
    loop, and others wait meanwhile."""

    @model_validator(mode="wrap")
    @classmethod
    def _counted(cls, said: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return read(said)
        except ValidationError as error:
            if error.error_count() <= MOST_WRONG:
                raise
            raise ValueError(f"{error.error_count():,} things are wrong with it") from None


def content_of(content: Any) -> Any:
    """Texts of a list of parts, joined; of one that shows pictures texts and pictures (`pictures.read_part`). Raises
    `ValueError`."""
    if not isinstance(content, list):
        return content
    read: list[dict[str, Any]] = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in IMAGES:
            try:
                read.append(read_part(part))
            except ValueError as error:
                raise ValueError(f"part {number}: {error}") from error
        elif kind in TEXT:
            words = part.get("text", part.get("refusal"))
            if not isinstance(words, str):
                raise ValueError("text: not a text")
            if read and read[-1]["type"] == "text":
                words = read.pop()["text"] + words
            read += [{"type": "text", "text": words}] * bool(words)
        elif kind not in UNREAD:
            raise ValueError(f"the policy reads text and pictures, and not a part of type {kind!r}")
    shows = any(part["type"] == "image" for part in read)
    return read if shows else "".join(part["text"] for part in read)


Content = Annotated[str | list[dict[str, Any]], BeforeValidator(content_of)]
"""A text, or a list of parts of which each is one, or a picture."""


def _nothing(value: Any) -> None:
    if value is not None and value is not False and value != []:
        raise ValueError("the policy cannot be asked for this; leave it out")


Never = Annotated[Any, AfterValidator(_nothing)]
"""Of a request, what would mean something else where nobody reads it."""
MOST_STOPS = 16
Stop = Annotated[str, Field(min_length=1)]
Stops = Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True)]
"""Texts that end an answer. An empty one would end it before it begins."""


TemplateKwargs = Annotated[dict[str, Any] | None, BeforeValidator(as_template_kwargs)]
"""What the chat template is told of this request, over what the run and the task say; null: nothing."""


class Function(BaseModel):
    """What a tool is called, and with what."""

    model_config = ConfigDict(extra="allow")
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(BaseModel):
    """As an assistant has asked for it."""

    model_config = ConfigDict(extra="allow")
    id: str | None = None
    function: Function


class Told(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    tool_calls: Listed[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class Described(BaseModel):
    """A function that the policy may ask for."""

    model_config = ConfigDict(extra="allow")
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """As chat templates want it."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: Described


class Several(Body):
    """What chat completions and completions are asked for alike. What is null is as if it were not said."""

    model_config = ConfigDict(extra="allow")
    stop: Stop | Stops | None = None
    n: int | None = Field(1, ge=1, le=64)
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None

    @property
    def stops(self) -> list[str]:
        """Texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def count(self) -> int:
        """Of answers."""
        return self.n or 1


def plain(messages: Sequence[Told]) -> list[dict[str, Any]]:
    """As chat templates want them; a developer's are a system's."""
    said = [message.model_dump(exclude_none=True) for message in messages]
    return [{**each, "role": "system" if each["role"] == "developer" else each["role"]} for each in said]
