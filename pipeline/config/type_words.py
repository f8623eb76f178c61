"""What a key may be, in words: ``int | None`` with ``ge=1`` is *whole number, at least 1, or null*."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import annotated_types as bounds
from pydantic import BaseModel, Strict
from pydantic.fields import FieldInfo

from penstock.pipeline.config.errors import models, tag

NAMES: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "truth values"),
    int: ("whole number", "whole numbers"),
    float: ("number", "numbers"),
    str: ("text", "texts"),
    Any: ("any value", "values"),
    dict: ("map of names to values", "maps"),
}
"""Of one, and of several."""


def kind(annotation: Any, limited: str = "") -> str:
    """The type in words; ``limited`` stands behind what it bounds. Raises `TypeError` for one that has no words yet."""
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return kind(inside[0], limits(inside[1:]) or limited)
    if origin is Literal:
        return either(f"`{choice}`" for choice in inside)
    if origin in (typing.Union, types.UnionType):
        return _union(annotation, limited)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    if origin is dict and models(inside[1]):
        return f"map from names to {_several(inside[1])}"
    if origin is list or (origin is tuple and inside[-1] is ...):
        return f"list of {_several(inside[0])}{limited}"
    if origin is tuple and len(set(inside)) == 1:
        return f"list of {len(inside)} {_several(inside[0])}"
    if (origin or annotation) in NAMES:
        return NAMES[origin or annotation][0] + limited
    raise TypeError(f"pipeline/config/type_words.py has no words for the type {annotation!r}")


def _union(annotation: Any, limited: str) -> str:
    inside = typing.get_args(annotation)
    nothing = ", or null" if type(None) in inside else ""
    below = models(annotation)
    if len(below) > 1:
        return f"section whose `type` is {either(f'`{tag(model)}`' for model in below)}{nothing}"
    words = [f"`{choice}`" for choice in literals(annotation)]
    words += [kind(each, limited) for each in inside if each is not type(None) and not literals(each)]
    return either(words) + nothing


def _several(annotation: Any) -> str:
    below = models(annotation)
    if below:
        chosen = f" whose `type` is {either(f'`{tag(model)}`' for model in below)}" if len(below) > 1 else ""
        return f"sections{chosen}"
    if choices := literals(annotation):
        return either(f"`{choice}`" for choice in choices)
    if typing.get_origin(annotation) is Annotated:
        return _several(typing.get_args(annotation)[0])
    if annotation not in NAMES:
        raise TypeError(f"pipeline/config/type_words.py has no words for a list of {annotation!r}")
    return NAMES[annotation][1]


def limits(metadata: Iterable[Any]) -> str:
    """A field's constraints, e.g. ``, at least 1``. Raises `TypeError` for one that has no words yet."""
    words: list[str] = []
    for each in metadata:
        if isinstance(each, FieldInfo):  # of a part of a union
            words.append(limits(each.metadata).removeprefix(", "))
        elif isinstance(each, Strict):
            continue  # what may not stand for it: `true` for 1
        elif isinstance(each, bounds.Ge):
            words.append(f"at least {each.ge}")
        elif isinstance(each, bounds.Gt):
            words.append(f"above {each.gt}")
        elif isinstance(each, bounds.Le):
            words.append(f"at most {each.le}")
        elif isinstance(each, bounds.Lt):
            words.append(f"below {each.lt}")
        elif isinstance(each, bounds.MultipleOf):
            words.append(f"a multiple of {each.multiple_of}")
        elif isinstance(each, bounds.MinLen):
            words.append(f"at least {each.min_length} of them")
        elif isinstance(each, bounds.MaxLen):
            words.append(f"at most {each.max_length} of them")
        elif pattern := getattr(each, "pattern", None):
            words.append(f"of the form `{pattern}`")
        else:
            raise TypeError(f"pipeline/config/type_words.py has no words for the constraint {each!r}")
    return "".join(f", {word}" for word in words)


def either(words: Iterable[str]) -> str:
    """``a, b or c``."""
    *most, last = list(words)
    return f"{', '.join(most)} or {last}" if most else last


def literals(annotation: Any) -> list[Any]:
    """The choices that ``annotation`` spells out."""
    if typing.get_origin(annotation) is Literal:
        return list(typing.get_args(annotation))
    return [choice for inside in typing.get_args(annotation) for choice in literals(inside)]


def is_list(annotation: Any) -> bool:
    """Whether a key of type ``annotation`` holds a list, or may."""
    inside = typing.get_args(annotation)
    return typing.get_origin(annotation) is list or any(typing.get_origin(each) is list for each in inside)


def is_map(annotation: Any) -> bool:
    """Whether a key of type ``annotation`` holds names of its user's choice."""
    return typing.get_origin(annotation) is dict
