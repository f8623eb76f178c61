"""How long an answer is: to watch it (weight 0), to pay for it, or to keep it below a limit."""

from __future__ import annotations


def length(response_tokens: int) -> float:
    """Tokens that the policy sampled."""
    return float(response_tokens)
