"""Secrets that a config has in it: everybody sees them who sees the run's folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from penstock.pipeline.config import Config
from penstock.pipeline.preflight.report import Report

_NAMED = re.compile(
    r"((api|access|secret|auth|private)[_-]?key|(hf|api|access|auth|bearer|secret)[_-]?token|^token|password|passwd"
    r"|secret|authorization)$",
    re.IGNORECASE,
)
"""What keys and options are called whose values nobody is to read."""
_SAID = re.compile(
    r"(?:^|[\s_-])(?:api|access|secret|auth)[_-]?(?:key|token)(?:=|\s+)[\"']?[^\s$\"']|bearer\s+[^\s$]", re.IGNORECASE
)
"""In a command or a header, such an option with its value, which is no variable."""


def look(config: Config, report: Report) -> None:
    """Each is noted by its key, without its value; `store.url`'s password is kept apart, and shown nowhere."""
    data = config.model_dump(mode="json")
    data["store"] = {}
    for key in _secrets(data, ""):
        report.notes.append(
            f"{key}: it has a secret, which stands in the run's folder, on its page and in what trackers are sent; "
            "leave it in the environment, where your function or program reads it"
        )


def _secrets(data: Any, key: str) -> Iterator[str]:
    if isinstance(data, dict):
        for name, value in data.items():
            at = f"{key}.{name}" if key else str(name)
            named = isinstance(value, str) and value and "$" not in value and _NAMED.search(str(name))
            yield from [at] if named else _secrets(value, at)
    elif isinstance(data, list):
        words = all(isinstance(value, str) for value in data)
        for index, value in enumerate([" ".join(data)] if words else data):
            yield from _secrets(value, key if words else f"{key}.{index}")
    elif isinstance(data, str) and (_SAID.search(data) or any(map(_has_password, data.split()))):
        yield key


def _has_password(text: str) -> bool:
    try:
        return "://" in text and not (urlsplit(text).password or "$").startswith("$")
    except ValueError:
        return False
