"""A config file that goes on from another one, which it names as ``extends``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

KEY = "extends"
KINDS = ("type", "environment", "scorer")
"""Keys that say what else a section has."""


class ExtendsError(ValueError):
    """Why what is extended cannot be."""


def whole(data: dict[str, Any], path: Path, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """What ``data``, of the file ``path``, says together with the files that it goes on from, each ``read``, and these
    with theirs; of two files the later one counts. Raises `ExtendsError`, and what ``read`` raises."""
    return _whole(data, (path.resolve(),), read)


def _whole(data: dict[str, Any], files: tuple[Path, ...], read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    named = data.get(KEY, [])
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ExtendsError(
            f"{files[-1]}: {KEY}: give a config file, or a list of them, as text, from this file's folder; not "
            f"{named!r:.60}"
        )
    found: dict[str, Any] = {}
    for name in names:
        file = (files[-1].parent / name).resolve()
        if file in files:
            raise ExtendsError(f"{files[-1]}: {KEY}: {name} goes on from this file itself; leave one of them out")
        found = merged(found, _whole(read(file), (*files, file), read))
    return merged(found, {name: value for name, value in data.items() if name != KEY})


def merged(base: Any, own: Any) -> Any:
    """``base`` with what ``own`` says: section by section, where both are sections of the same kind, and ``own`` does
    not say that it goes on from nothing (``extends: null``). All else, lists too, is as ``own`` has it.

    >>> merged({"a": {"type": "x", "b": 1}, "c": [1]}, {"a": {"d": 2}, "c": [3]})
    {'a': {'type': 'x', 'b': 1, 'd': 2}, 'c': [3]}
    >>> merged({"a": {"type": "x", "b": 1}}, {"a": {"type": "y"}})
    {'a': {'type': 'y'}}
    >>> merged({"a": {"b": 1}}, {"a": {"extends": None, "c": 2}})
    {'a': {'c': 2}}
    """
    if not isinstance(own, Mapping):
        return own
    alone = KEY in own and own[KEY] is None
    if alone:
        own = {name: value for name, value in own.items() if name != KEY}
    if alone or not isinstance(base, Mapping) or _other_kind(base, own):
        base = {}
    return {**base, **{name: merged(base.get(name), value) for name, value in own.items()}}


def _other_kind(base: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    return any(isinstance(own.get(kind), str) and own[kind] != base.get(kind) for kind in KINDS)
