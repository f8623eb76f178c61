"""Layers by their names, as a config gives them: the end of a name, or a pattern of whole ones. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase


def is_pattern(wanted: str) -> bool:
    """It has signs of a shell's patterns: ``*`` is any text, ``?`` a character, ``[0-3]`` one of some."""
    return any(sign in wanted for sign in "*?[")


def is_called(name: str, wanted: Sequence[str]) -> bool:
    """The layer ``name`` is called like one of those ``wanted``: it ends in that, or is like that pattern."""
    return any(fnmatchcase(name, each) if is_pattern(each) else f".{name}".endswith(f".{each}") for each in wanted)
