"""Which experts a mixture sent each token to, by layer of experts: ``[tokens, layers, experts of a token]``.

The dtype is uint8 or int16; its largest number stands for an expert that is not known, as of a token that no engine has
run. Where nothing was recorded, the array is empty: ``[0, 0, 0]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DTYPES = ("uint8", "int16")


@dataclass(frozen=True)
class Mixture:
    """What a model has to route tokens to."""

    layers: int
    """Of experts."""
    chosen: int
    """Experts of a token."""
    experts: int

    def fault(self, routing: np.ndarray) -> str:
        """Why ``routing``, which is well formed, is not of this model; empty where it is, or says nothing."""
        if not routing.size:
            return ""
        numbers = routing[routing != unknown(routing.dtype)]
        if routing.shape[1:] == (self.layers, self.chosen) and numbers.max(initial=0) < self.experts:
            return ""
        return (
            f"routing: {routing.shape[1]} layers, {routing.shape[2]} experts for a token, expert "
            f"{numbers.max(initial=0)}; the trainer's model has {self.layers} layers of {self.experts} experts, "
            f"{self.chosen} for a token"
        )


def no_routing() -> np.ndarray:
    """Of an engine that has recorded nothing."""
    return np.zeros((0, 0, 0), np.uint8)


def routing_dtype(experts: int) -> np.dtype:
    """The smallest that has a number for each of ``experts``, and one more."""
    return np.dtype(np.uint8 if experts < 256 else np.int16)


def unknown(dtype: np.dtype) -> int:
    """What stands for an expert that is not known."""
    return int(np.iinfo(dtype).max)


def unrouted(tokens: int, like: np.ndarray) -> np.ndarray:
    """Of as many ``tokens`` nothing is known; layers and dtype are those of ``like``."""
    return np.full((tokens, *like.shape[1:]), unknown(like.dtype), like.dtype)


def fault(routing: np.ndarray, tokens: int) -> str:
    """What is wrong with it, as the routing of so many ``tokens``; empty where nothing is."""
    if routing.dtype.name not in DTYPES or routing.ndim != 3 or len(routing) not in (0, tokens):
        return f"expected uint8 or int16 [{tokens}, layers, experts], or none, got {routing.dtype} {routing.shape}"
    return "negative number of an expert" if routing.size and routing.min() < 0 else ""


def joined(parts: Sequence[np.ndarray], tokens: Sequence[int]) -> np.ndarray:
    """The routing of several sequences, one behind the other, each of so many ``tokens``: empty where none has any.
    Raises `ValueError` where they are of different models."""
    some = next((part for part in parts if part.size), None)
    if some is None:
        return no_routing()
    if any(part.size and (part.shape[1:], part.dtype) != (some.shape[1:], some.dtype) for part in parts):
        raise ValueError("routing: of models with different layers or experts")
    return np.concatenate([part if part.size else unrouted(n, some) for part, n in zip(parts, tokens, strict=True)])
