"""How far two computations of the same may lie apart, by what they compute in: the one table."""

from __future__ import annotations

LOGPROBS: dict[str, float] = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
"""Mean absolute difference of log-probabilities, in nats, between an engine and the trainer on the same weights."""
LOGITS: dict[str, float] = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""Largest difference of logits, in their standard deviations, between two ways to run the same model's code."""
