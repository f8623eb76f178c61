"""Secrets that a config has in it: everybody sees them who sees the run's folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from penstock.pipeline.config import Config
from penstock.pipeline.preflight.report import Report

_NAMED = re.compile(r"((api|access|secret|auth)[_-]?(key|token)|password|passwd|secret)$", re.IGNORECASE)
"""What keys and options are called whose values nobody is to read."""
_OPTION = re.compile(r"--?(?:api|access|secret|auth)[_-]?(?:key|token)(?:=|\s+)[^\s$]", re.IGNORECASE)
"""In a command, such an option with its value, which is no variable."""


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
            named = isinstance(value, str) and value and not value.startswith("$") and _NAMED.search(str(name))
            yield from [at] if named else _secrets(value, at)
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from _secrets(value, f"{key}.{index}")
    elif isinstance(data, str) and (_OPTION.search(data) or _has_password(data)):
        yield key


def _has_password(text: str) -> bool:
    try:
        return "://" in text and bool(urlsplit(text).password)
    except ValueError:
        return False
