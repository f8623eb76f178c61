"""The words of messages, as a chat template is told of them."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.protocols.experience import PICTURE
from penstock.services.data.pictures import in_parts
from penstock.services.turns.calls_told import Message


def says(told: str, written: str) -> bool:
    """All of ``written`` is there, whatever a template does to the space around it."""
    return "".join(written.split()) in "".join(told.split())


def shown_in_parts(messages: Sequence[Message]) -> list[Message]:
    """Those that show pictures in parts; others stay text, which is all that some templates take of them."""
    return [{**m, "content": in_parts(m["content"])} if PICTURE in m["content"] else m for m in messages]


def contents(messages: Sequence[Message]) -> str:
    return "\n\n".join(message.get("content") or "" for message in messages)
