"""Positions that a run gives to its models, in the place of those in their config.json: `model.max_position_embeddings`
and `model.rope_parameters`.

A process works for one config, so what that says is known to all of it: policy, reference and critic.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Positions:
    """What is said of them."""

    count: int | None = None
    """Tokens of the longest sequence; None: as many as the file says."""
    rope: dict[str, Any] = field(default_factory=dict)
    """Of the rotary embedding, beside or in the place of what the file says."""


_said = Positions()
_of: frozenset[str] = frozenset()


def say(positions: Positions, paths: Collection[str]) -> None:
    """From now on models at these ``paths`` (folders or hub names, as the config has them) have these."""
    global _said, _of
    _said, _of = positions, frozenset(paths)


def said(path: str) -> bool:
    """There is something to say of the model at ``path``."""
    return path in _of and _said != Positions()


def applied(path: str, file: dict[str, Any]) -> dict[str, Any]:
    """What the config.json of the model at ``path`` says, with them."""
    if not said(path):
        return file
    if isinstance(text := file.get("text_config"), dict):
        return {**file, "text_config": applied(path, text)}
    before = file.get("rope_parameters") or file.get("rope_scaling") or {}
    return {**file, **_changed(file.get("max_position_embeddings"), before)}


def apply(path: str, config: Any) -> None:
    """To transformers' ``config`` of the model at ``path``. Raises `ValueError` where it has no such embedding."""
    if not said(path):
        return
    text = config.get_text_config()
    before = getattr(text, "rope_parameters", None)
    if _said.rope and (before is None or any(isinstance(each, dict) for each in before.values())):
        why = "one for each kind of layer" if before else "none"
        raise ValueError(f"model.rope_parameters: {text.model_type} has {why}; leave it out")
    if getattr(text, "max_position_embeddings", None) is None:
        raise ValueError(f"model.max_position_embeddings: {text.model_type} counts no positions; leave it out")
    for name, value in _changed(text.max_position_embeddings, before or {}).items():
        setattr(text, name, value)


def _changed(count: int | None, rope: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"max_position_embeddings": _said.count or count}
    if _said.rope:
        # It is stretched from what was learned, and not from what it is to reach.
        learned = {"original_max_position_embeddings": count} if "factor" in _said.rope and count else {}
        found["rope_parameters"] = learned | rope | _said.rope
    return found
