"""A turn's answer on its way from the engine to the gateway: bytes that the broker keeps and does not read."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from penstock.protocols import wire
from penstock.protocols.experience import Finish, no_candidates
from penstock.protocols.routing import DTYPES, no_routing
from penstock.services.turns.joining import Sampled

_ARRAYS = {"tokens": "int32", "logprobs": "float32", "versions": "int32"}
_ARRAYS |= {"candidate_counts": "int32", "candidate_ids": "int32"}
_FIELDS = {*_ARRAYS, "finish", "engine_s", "routing"}


@dataclass(frozen=True)
class Answer:
    """What the policy said in one turn. Arrays as of `joining.Sampled`."""

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish: Finish = "stop"
    candidate_counts: np.ndarray = field(default_factory=no_candidates)
    candidate_ids: np.ndarray = field(default_factory=no_candidates)
    routing: np.ndarray = field(default_factory=no_routing)
    engine_s: float = 0.0
    """Seconds that the rollout's engine had the turn."""


def pack_answer(said: Sampled, finish: Finish, engine_s: float) -> bytes:
    """One buffer."""
    arrays = {name: getattr(said, name).astype(kind) for name, kind in _ARRAYS.items()}
    return wire.pack(arrays | {"finish": finish, "engine_s": engine_s, "routing": said.routing})


def unpack_answer(data: bytes | memoryview) -> Answer:
    """The answer of `pack_answer`. Raises `wire.WireError` where it is none."""
    found = wire.unpack(data)
    if isinstance(found, dict):
        found.setdefault("routing", no_routing())  # a broker's store may have answers of older code
    if not isinstance(found, dict) or found.keys() != _FIELDS or found["finish"] not in ("stop", "length"):
        raise wire.WireError("not the answer of a turn")
    if not isinstance(found["engine_s"], float):
        raise wire.WireError("the answer of a turn: engine_s is no number of seconds")
    for name, kind in _ARRAYS.items():
        if not isinstance(found[name], np.ndarray) or found[name].dtype.name != kind or found[name].ndim != 1:
            raise wire.WireError(f"the answer of a turn: {name} is not {kind} with one dimension")
    routing = found["routing"]
    if not isinstance(routing, np.ndarray) or routing.dtype.name not in DTYPES or routing.ndim != 3:
        raise wire.WireError("the answer of a turn: routing is not uint8 or int16 with three dimensions")
    return Answer(**found)
