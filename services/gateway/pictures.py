"""Pictures in what agents say: of each API's parts of a message one form, in which a picture has a name.

``{"type": "image", "picture": …}``: the file as bytes when it arrives, and its digest in conversations that are
compared, kept and told on. A session knows the file to each digest (`session.Turn.pictures`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from penstock.services.data.picture_files import check_picture, format_of, pixels_of
from penstock.services.gateway.errors import AgentError

IMAGES = {"image_url", "input_image", "image"}
"""As OpenAI's chat completions, its responses, and Anthropic call such a part; `AgentClient` may give bytes."""
MOST_PICTURES, MOST_PIXELS, MOST_BYTES = 500, 250_000_000, 24 << 20
"""Of a conversation: an engine opens them all, and few bytes may have many pixels. As many as 120 screens have."""


def read_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a kind among `IMAGES`, in our form. Raises `ValueError`."""
    found = part.get("picture") or part.get("image") or part.get("image_url") or part.get("source")
    if isinstance(found, Mapping):  # OpenAI's url, or Anthropic's data
        found = found.get("url") or found.get("data")
    if isinstance(found, str):
        found = _decoded(found)
    if not isinstance(found, bytes) or not found:
        uploaded = "; files that were uploaded are not known here" * ("file_id" in part)
        what = f"a part of type {part.get('type')!r} has no picture"
        raise ValueError(f"{what}: give it as a data: URL, or in base64{uploaded}")
    check_picture(found)
    return {"type": "image", "picture": found}


def named(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """``messages`` with digests in the place of files, and the files by these."""
    files: dict[str, bytes] = {}
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = [_named(part, files) for part in content]
        found.append({**message, "content": content})
    return found, files


def check_shown(shown: Sequence[bytes], of_session: Collection[bytes], room: int) -> None:
    """Raises `AgentError` where a conversation shows more than it may, or its session would, which has ``room`` for so
    many bytes."""
    about = (
        (len(shown), MOST_PICTURES, "pictures", "a conversation"),
        (sum(map(len, shown)), MOST_BYTES, "bytes of pictures", "a conversation"),
        (sum(map(pixels_of, shown)), MOST_PIXELS, "pixels", "a conversation"),
        (sum(map(len, of_session)), room, "bytes of pictures", "a session"),
    )
    for found, most, unit, of in about:
        if found > most:
            said = f"{of} shows at most {most:,} {unit}, and this would show {found:,}: show fewer, or smaller ones"
            raise AgentError(413, "too_large", said)


def data_url(picture: bytes) -> str:
    """It as agents that speak JSON have one."""
    return f"data:image/{format_of(picture) or 'unknown'};base64,{base64.b64encode(picture).decode()}"


def digest_of(picture: bytes) -> str:
    """What it is called in a conversation."""
    return hashlib.sha256(picture).hexdigest()


def digests(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Of the pictures that ``messages`` show, in their order."""
    for message in messages:
        if isinstance(content := message.get("content"), list):
            yield from (part["picture"] for part in content if part.get("type") == "image")


def _named(part: Any, files: dict[str, bytes]) -> Any:
    if not isinstance(part, Mapping) or not isinstance(picture := part.get("picture"), bytes):
        return part
    files[name := digest_of(picture)] = picture
    return {**part, "picture": name}


def _decoded(said: str) -> bytes:
    """A ``data:`` URL, or base64 alone. Raises `ValueError`."""
    if "://" in said[:16]:
        raise ValueError(f"{said[:60]} is not fetched: send the picture itself, as a data: URL")
    head, comma, rest = said.partition(",")
    if comma and not head.endswith(";base64"):
        raise ValueError(f"{head[:60]}: a picture's data: URL is in base64")
    try:
        return base64.b64decode(rest if comma else said, validate=True)
    except binascii.Error as error:
        raise ValueError(f"a picture is not in base64: {error}") from None
