"""What every message is: a checked body whose type is its class's name."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.protocols.wire import Envelope, WireError

MOST_WRONG = 16
"""Things that are wrong with a body, and are looked at one by one: a peer's list may have millions."""


class Message(BaseModel):
    """A body on the wire; its type is the class's name."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)
    registry: ClassVar[dict[str, type[Message]]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        cls.registry[cls.__name__] = cls


def to_envelope(message: Message, id: int = 0, reply_to: int = 0) -> Envelope:
    """``message`` ready for `wire.encode`."""
    return Envelope(type(message).__name__, id, reply_to, message.model_dump())


def from_envelope(envelope: Envelope) -> Message:
    """The message in ``envelope``. Raises `WireError` on an unknown type or a body that breaks its model."""
    model = Message.registry.get(envelope.type)
    if model is None:
        raise WireError(f"unknown message type {envelope.type[:80]!r}")
    try:
        return model.model_validate(envelope.body)
    except ValidationError as error:
        if (count := error.error_count()) > MOST_WRONG:
            raise WireError(f"{envelope.type}: {count:,} fields or items are wrong") from None
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])
        raise WireError(f"{envelope.type}: {problems}") from None
