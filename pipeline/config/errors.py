"""A pydantic `ValidationError` in the user's words: the key's path, what is wrong, and the nearest that is right."""

from __future__ import annotations

import difflib
import types
import typing
from typing import Annotated, Any

from pydantic import BaseModel

from penstock.pipeline.config.foreign_names import known_here
from penstock.pipeline.config.schema import Config
from penstock.services.broker.config import ONE_SET
from penstock.services.runtime.nearest import closest, hint, nearest

ALIKE = 0.75
"""Above it a name is taken for a slip of the pen, below it rather for another key's."""
MOST_MEANT = 3

FILES = {"json": ("jsonl", "json"), "csv": ("csv",), "parquet": ("parquet",)}
"""What `datasets` calls files, by how their names end."""
PREFERENCES = ("kto", "orpo", "simpo", "cpo")
"""Methods that others have and that are none of ours, though some of ours have a name like theirs."""


def explain(data: Any, problem: Any) -> str:
    """One line for one of the ``errors()`` of a `ValidationError` that validating ``data`` as a `Config` raised."""
    path = _path(data, problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        return f"{'.'.join(map(str, path))}: unknown key; {_meant(data, path, problem['input'])}"
    if problem["type"] == "missing":
        return f"{'.'.join(map(str, path))}: missing; give it a value"
    if problem["type"] == "literal_error":
        message += f", got {problem['input']!r}" + _hint(str(problem["input"]), problem["ctx"]["expected"].split("'"))
    elif problem["type"] == "union_tag_not_found":
        near = [f"type: {tag(model)}" for model in _sections(data, path)]
        message = f"say which kind it is, with one of {', '.join(near)}" + _files(problem["input"])
    elif problem["type"] == "union_tag_invalid":
        known = problem["ctx"]["expected_tags"]
        message = f"type is {problem['ctx']['tag']!r}, but must be one of {known}"
        message += _files(problem["input"]) or _hint(problem["ctx"]["tag"], known.split("'"))
    elif problem["type"] == "string_pattern_mismatch" and "A-Za-z0-9" in problem["ctx"]["pattern"]:
        message = f"{problem['input']!r} is no name: give letters, digits, ., _ and - alone, a letter or digit first"
    elif problem["type"] in ("model_type", "model_attributes_type"):
        message = f"{problem['input']!r} is no section; give {_as_section(data, path, problem['input'])}"
    elif problem["type"] in ("tuple_type", "list_type"):
        given = problem["input"]
        message = f"{given!r} is no list; " + ("leave it out" if given is None else f"give one, e.g. [{given}]")
    elif problem["type"] != "value_error":
        message += f", got {problem['input']!r}"
        if problem["type"] == "string_type" and isinstance(problem["input"], int | float):
            message += "; put it in quotes"
    return f"{'.'.join(map(str, path)) or 'config'}: {message}"


def _as_section(data: Any, path: list[Any], value: Any) -> str:
    """The section that ``value`` alone may have meant, as YAML."""
    sections = _sections(data, path)
    if kinds := {tag(section): section for section in sections if tag(section)}:
        if near := value if value in kinds else closest(str(value), kinds):
            return f"{{type: {near}}}"
        kind, section = next(iter(kinds.items()))
        more = f", path: {value}" if isinstance(value, str) and "path" in section.model_fields else ""
        return f"{{type: {kind}{more}}}, or another type: {', '.join([*kinds][1:])}"
    for first, field in sections[0].model_fields.items() if sections else ():
        if isinstance(value, str) and field.annotation is str:
            return f'{{{first}: "{value}"}}'
        return f"keys and values, such as {{{first}: …}}"
    return "keys and values"


def _meant(data: Any, path: list[Any], value: Any) -> str:
    """What the unknown key at ``path`` may stand for: the same of another kind of section, one here that is spelled
    almost alike, what others call so, one of the same name elsewhere, one here that is spelled a little alike."""
    from penstock.pipeline.config.key_reference import find, same_name  # parses docstrings, and imports this module

    dotted, last = ".".join(map(str, path)), str(path[-1])
    kinds = dict.fromkeys(", ".join(key.needs) for key in find(dotted) if key.needs and key.path.endswith(f".{last}"))
    if kinds:
        return f"it belongs to {' or '.join(kinds)}"
    known = sorted({name for model in _sections(data, path[:-1]) for name in model.model_fields})
    near = closest(last, known)
    if near and (
        near.startswith(last) or near.endswith(f"_{last}") or difflib.SequenceMatcher(None, last, near).ratio() > ALIKE
    ):
        return nearest(last, known)
    if here := known_here(path, value):
        return here
    if elsewhere := same_name(dotted)[:MOST_MEANT]:
        return f"did you mean {' or '.join(elsewhere)}?"
    return nearest(last, known, f"known keys: {', '.join(known)}")


def _path(data: Any, loc: tuple[Any, ...]) -> list[Any]:
    """``loc`` without the union tags that pydantic puts between the keys."""
    path: list[Any] = []
    tagged = False
    for index, part in enumerate(loc):
        if isinstance(data, dict):
            last = index + 1 == len(loc)  # where the type is not given, that may be a key that is missing
            is_tag = part == data["type"] if "type" in data else part not in data and not last
            if is_tag and index and not tagged:
                tagged = True  # what comes next is a key, also where that has the type's name, as vllm
                continue
            tagged = False
            if part == ONE_SET and part not in data:
                continue  # the one evaluation set, that the config gives no name
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        elif not isinstance(data, list) and part != "[key]":
            continue  # which of several types a value is taken for
        path.append(part)
    return path


def _files(section: Any) -> str:
    """What to write for rows in files, where ``section`` of another kind, or of none, seems to mean that."""
    if not isinstance(section, dict):
        return ""
    given = section.get("files")
    files = [str(name) for name in (given if isinstance(given, list) else [given] if isinstance(given, str) else [])]
    said = [section.get("type"), section.get("path"), *files]
    for kind, ends in FILES.items():
        if any(str(each).rpartition(".")[2].lower() in ends for each in said):
            named = ", ".join(files) or f"rows.{ends[0]}"
            return f"; files of your own are {{type: hub, path: {kind}, files: [{named}]}}"
    return ""


def _hint(said: str, known: list[str]) -> str:
    if said.lower() in ("dpo", "ipo"):
        return "; training from pairs is preset: dpo, with advantage: {shape: ipo} for IPO"
    return "; of pairs that rows bring there is preset: dpo alone" if said.lower() in PREFERENCES else hint(said, known)


def _sections(data: Any, path: list[Any]) -> list[type[BaseModel]]:
    """The sections that may stand at ``path``: one, or those of a union whose ``type`` is not given."""
    here: list[type[BaseModel]] = [Config]
    named = False
    for part in path:
        data = data.get(part) if isinstance(data, dict) else data[part] if isinstance(data, list) else None
        if isinstance(part, int):
            continue
        fields = [parent.model_fields[part] for parent in here if part in parent.model_fields]
        if not fields and named:
            named = False  # a name of the user's own, in a map of sections
            continue
        named = any(typing.get_origin(field.annotation) is dict for field in fields)
        here = [m for field in fields for m in models(field.annotation)]
        tagged = [m for m in here if isinstance(data, dict) and tag(m) == data.get("type")]
        here = tagged or here
    return here


def models(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field of type ``annotation`` may hold: itself, a union's members, a list's elements, a
    map's values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType, list, dict, Annotated):
        return [m for argument in typing.get_args(annotation) for m in models(argument)]
    return []


def tag(model: type[BaseModel]) -> Any:
    """What ``type:`` chooses ``model``, where it is a member of a union."""
    field = model.model_fields.get("type")
    return field.default if field else None
