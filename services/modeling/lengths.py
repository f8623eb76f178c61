"""How long a sequence may be."""

from __future__ import annotations

from typing import Any


def positions_of(config: Any) -> int | None:
    """Tokens that the model of transformers' ``config`` has positions for, also where it has learned fewer, and they
    are stretched (YaRN, arXiv:2309.00071); None: it has no such bound."""
    text = config.get_text_config()
    learned: int | None = getattr(text, "max_position_embeddings", None) or None
    rope = getattr(text, "rope_parameters", None) or {}
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    return max(learned, int(factor * original)) if learned and factor and original else learned


def longest_sequence(engine: Any, positions: int | None) -> int | None:
    """Tokens that a prompt and its answer may have together: what ``engine``, a section of the config, allows, and no
    more than the model has ``positions`` for. None where the engine alone knows."""
    allowed: int | None = engine.max_length
    return min(allowed, positions or allowed) if allowed else None
