"""A group as one buffer: the arrays of its trajectories behind each other, and how long each is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.protocols import routing, wire
from penstock.protocols.experience import ALONE, Bytes, ExperienceError, Group, Prompt, Trajectory

_COLUMNS = ("tokens", "loss_mask", "logprobs", "versions")
_CANDIDATES = ("candidate_counts", "candidate_ids")
_OPTIONAL = ("rewards", "routing")
"""By token, or empty."""


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_places(value: Any) -> bool:
    return isinstance(value, list) and all(type(place) is int and place >= 0 for place in value)


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_text(name) and isinstance(number, float) and math.isfinite(number) for name, number in value.items()
    )


_SAID: dict[str, Callable[[Any], bool]] = {
    "text": _is_text,
    "finish": lambda value: value in ("stop", "length"),
    "turns": lambda value: isinstance(value, list | tuple) and all(map(_is_text, value)),
    "failure": _is_text,
    "greedy": _is_truth,
    "given": _is_truth,
    "session": lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= ALONE,
    "metrics": _are_numbers,
}
"""What a packed group has for each trajectory, beside arrays; and what such a value is."""
_LISTS = {**_SAID, "shows": _are_places}
"""With which pictures it shows: of its prompt's, and those behind them that no prompt has."""


def pack_group(group: Group) -> bytes:
    """``group`` as one buffer: its trajectories' arrays concatenated, with their lengths (int32 ``[n]``); each picture
    once."""
    trajectories = group.trajectories
    places = {picture: place for place, picture in reversed([*enumerate(group.prompt.pictures)])}
    more: list[bytes] = []
    for picture in (picture for trajectory in trajectories for picture in trajectory.pictures):
        if picture not in places:
            places[picture] = len(group.prompt.pictures) + len(more)
            more.append(picture)
    lengths = [len(t.tokens) for t in trajectories]
    columns = {name: np.concatenate([getattr(t, name) for t in trajectories]) for name in _COLUMNS}
    return wire.pack(
        {
            "number": group.number,
            "prompt": group.prompt.model_dump(),
            "lengths": np.array(lengths, np.int32),
            "routing": routing.joined([t.routing for t in trajectories], lengths),
            **columns,
            **{name: np.concatenate([getattr(t, name) for t in trajectories]) for name in (*_CANDIDATES, "rewards")},
            "pictures": more,
            "shows": [[places[picture] for picture in t.pictures] for t in trajectories],
            **{name: [getattr(t, name) for t in trajectories] for name in _SAID},
        }
    )


def unpack_group(data: bytes | memoryview) -> Group:
    """The group of `pack_group`, every rule checked. Raises `ExperienceError` or `wire.WireError`."""
    fields = wire.unpack(data)
    if isinstance(fields, dict):
        fields.setdefault("routing", routing.no_routing())  # archives of older code have none of these
        if isinstance(fields.get("greedy"), list):
            fields.setdefault("given", [False] * len(fields["greedy"]))
            fields.setdefault("shows", [[]] * len(fields["greedy"]))
            fields.setdefault("pictures", [])
    expected = {"pictures", "number", "prompt", "lengths", "rewards", "routing", *_LISTS, *_COLUMNS, *_CANDIDATES}
    if not isinstance(fields, dict) or fields.keys() != expected:
        raise ExperienceError(f"a group has the fields {', '.join(sorted(expected))}")
    lengths = fields["lengths"]
    if (
        not isinstance(fields["number"], int)
        or not isinstance(lengths, np.ndarray)
        or lengths.dtype != np.int32
        or lengths.ndim != 1
    ):
        raise ExperienceError("number or lengths have wrong types")
    for name, right in _LISTS.items():
        values = fields[name]
        if not isinstance(values, list) or len(values) != len(lengths) or not all(map(right, values)):
            raise ExperienceError(f"lengths and {name} do not agree, or it has values that it may not have")
    if not len(lengths) or lengths.min() < 1:
        raise ExperienceError("a group has at least one trajectory, each of at least one token")
    bounds = np.cumsum(lengths, dtype=np.int64)
    for name in _COLUMNS:
        if not isinstance(fields[name], np.ndarray) or fields[name].shape != (int(bounds[-1]),):
            raise ExperienceError(f"{name}: expected one value for each of {int(bounds[-1])} tokens")
    try:
        prompt = Prompt.model_validate(fields["prompt"])
    except ValueError as error:
        raise ExperienceError(f"prompt: {error}") from None
    if not all(isinstance(fields[name], np.ndarray) for name in (*_CANDIDATES, *_OPTIONAL)):
        raise ExperienceError("candidate_counts, candidate_ids, rewards, routing: expected arrays")
    columns = {name: fields[name] for name in (*_COLUMNS, *_CANDIDATES, *_OPTIONAL)}
    Trajectory(**columns)  # every rule on all trajectories at once, several times faster
    starts = [0, *bounds[:-1].tolist()]
    before = np.concatenate([[0], np.cumsum(fields["candidate_counts"], dtype=np.int64)])
    said = zip(*(fields[name] for name in _SAID), strict=True)
    pictures = _pictures(prompt, fields["pictures"], fields["shows"])
    trajectories = [
        _cut(columns, slice(start, end), before, words, tuple(pictures[place] for place in shows))
        for start, end, words, shows in zip(starts, bounds.tolist(), said, fields["shows"], strict=True)
    ]
    return Group(fields["number"], prompt, trajectories)


def _pictures(prompt: Prompt, more: Any, shows: list[list[int]]) -> list[bytes]:
    every = [*prompt.pictures, *(more if isinstance(more, list) else [None])]
    if not all(isinstance(each, bytes) for each in every) or any(place >= len(every) for row in shows for place in row):
        raise ExperienceError("pictures: files, of which shows names those that there are")
    return every


def lengths_of(data: Bytes) -> np.ndarray:
    """int32 ``[trajectories]``: how many tokens each trajectory of a packed group has."""
    return _field(data, "lengths", np.ndarray)


def failures_of(data: Bytes) -> list[str]:
    """Why each trajectory of a packed group has no reward; empty: nothing keeps it from having one."""
    return _field(data, "failure", list)


def sessions_in(data: Bytes) -> list[int]:
    """`Trajectory.session` of each trajectory of a packed group."""
    return _field(data, "session", list)


def source_in(data: Bytes) -> str:
    """`Prompt.source` of what a packed group answers."""
    found = _field(data, "prompt", dict).get("source", "")
    if not isinstance(found, str):
        raise ExperienceError("not a group: its prompt's source is no text")
    return found


def _field(data: Bytes, name: str, kind: type) -> Any:
    fields = wire.unpack(data.data)
    found = fields.get(name) if isinstance(fields, dict) else None
    if not isinstance(found, kind):
        raise ExperienceError(f"not a group: it has no {name}")
    return found


def _cut(
    columns: dict[str, np.ndarray], part: slice, before: np.ndarray, words: tuple[Any, ...], pictures: tuple[bytes, ...]
) -> Trajectory:
    """One trajectory out of columns that were checked as a whole. ``before[i]``: candidate ids before token i;
    ``words``: its own of each of `_SAID`."""
    trajectory = object.__new__(Trajectory)
    for name in (*_COLUMNS, "candidate_counts", *_OPTIONAL):
        object.__setattr__(trajectory, name, columns[name][part])
    ids = columns["candidate_ids"]
    object.__setattr__(trajectory, "candidate_ids", ids[before[part.start] : before[part.stop]] if ids.size else ids)
    object.__setattr__(trajectory, "pictures", pictures)
    for name, value in zip(_SAID, words, strict=True):
        object.__setattr__(trajectory, name, tuple(value) if isinstance(value, list) else value)
    return trajectory
