"""How much text there may be room for, before its tokens are counted."""

from __future__ import annotations

MOST_CHARACTERS = 32
"""For each token that there may be; text has four or five."""


def too_long(size: int, max_length: int | None) -> str:
    """Why there is no need to count the tokens of ``size`` characters, which takes long: whoever counts has others who
    wait. Empty: they may have room in ``max_length`` tokens, None where only the engine knows how many there may be."""
    if max_length is None or size <= MOST_CHARACTERS * max_length:
        return ""
    return (
        f"the conversation adds {size} characters: too many for the {max_length} tokens that rollout.engine and the "
        "model take"
    )
