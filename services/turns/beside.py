"""What a chat template is told beside messages and tools: `model.chat_template_kwargs`, a prompt's and a request's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def in_json(value: Any) -> str:
    """To be compared: ``0`` is not ``false``, as it is in Python."""
    return json.dumps(value, sort_keys=True, default=str)


def added(own: Mapping[str, Any], more: Mapping[str, Any] | None) -> dict[str, Any]:
    """What ``more`` says that ``own`` does not.

    >>> added({"level": 1, "thinking": False}, {"level": True, "thinking": False})
    {'level': True}
    """
    known = {name: in_json(value) for name, value in own.items()}
    return {name: value for name, value in (more or {}).items() if in_json(value) != known.get(name)}


def words_of(template: Any) -> frozenset[str]:
    """Of a chat ``template``, or of several by name: names among them may be looked at."""
    return frozenset(re.findall(r"\w+", str(template or "")))
