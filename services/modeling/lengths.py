"""How long a sequence may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def positions_of(config: Any) -> int | None:
    """Tokens that the model of transformers' ``config`` has positions for, as `stretched`; None: it has no such
    bound."""
    text = config.get_text_config()
    return stretched(getattr(text, "max_position_embeddings", None), getattr(text, "rope_parameters", None))


BY_LENGTH = ("longrope", "dynamic")
"""Rotary embeddings that are others for every token of a batch once its longest sequence is longer than the model has
learned: neither would a token have the log-probability that it was sampled with, nor one that is its own alone."""


def stretched(learned: int | None, rope: Mapping[str, Any] | None) -> int | None:
    """Tokens that a model has positions for whose config says ``learned``, also where it has learned fewer, and they
    are stretched (YaRN, arXiv:2309.00071), by what it says of its rotary embedding; of those that change with the
    length (`BY_LENGTH`) as many as do not change it. None: it has no such bound."""
    if not learned:
        return None
    rope = rope or {}
    if (rope.get("rope_type") or rope.get("type")) in BY_LENGTH:
        return rope.get("original_max_position_embeddings") or learned
    yarn = "yarn" in (rope.get("rope_type"), rope.get("type"))
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings") or (yarn and learned)
    return max(learned, int(factor * original)) if factor and original else learned


def longest_sequence(engine: Any, positions: int | None) -> int | None:
    """Tokens that a prompt and its answer may have together: what ``engine``, a section of the config, allows, and no
    more than the model has ``positions`` for. None where the engine alone knows."""
    allowed: int | None = engine.max_length
    return min(allowed, positions or allowed) if allowed else None
