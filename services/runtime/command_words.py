"""The command of a user's own that a config gives, for a program that is started without a shell."""

from __future__ import annotations

import json
import re
import shlex

_SHELL, _ASSIGNED = {"&&", "||", "|", ";", "&", ">", ">>", "<", "2>&1"}, re.compile(r"^\w+=")


def words_of(command: str | tuple[str, ...], example: str) -> list[str]:
    """The program, and what it is told. ``example``: a command that would do. Raises `ValueError` where none is named,
    or where it wants a shell."""
    try:
        words = shlex.split(command) if isinstance(command, str) else list(command)
    except ValueError as error:
        raise ValueError(f"{command!r} cannot be split into words: {error}; give a list") from None
    if not words or not words[0]:
        raise ValueError(f"no program is named; give e.g. {example}")
    found = [word for word in words if word in _SHELL] or _ASSIGNED.findall(words[0])
    if isinstance(command, str) and found:
        bash = f"[bash, -c, {json.dumps(command)}]"
        raise ValueError(f"{found[0]!r} is for a shell, and there is none: give {bash}, or variables as env")
    return words
