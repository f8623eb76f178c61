"""Turns of agents' sessions, one by one: what a rollout answers in a run that has gateways."""

from __future__ import annotations

import time

import numpy as np

from penstock.protocols.experience import UNSAMPLED, as_bytes
from penstock.protocols.messages import Generate, Generated
from penstock.services.rollout.engines.base import Completion, Engine, Refusal, Request, RequestError
from penstock.services.turns.answers import pack_answer
from penstock.services.turns.tokenizer import Tokenizer


class TurnServer:
    """Called from the rollout's one thread."""

    def __init__(self, engine: Engine, text: Tokenizer) -> None:
        self._engine, self._text = engine, text
        self._open: dict[int, float] = {}
        """Turns that are being answered, and since when."""

    def start(self, asked: Generate) -> Generated | None:
        """Begins to answer. Returns the answer where there will be none."""
        if asked.id in self._open:
            return None
        tokens = np.frombuffer(asked.prompt.tobytes(), np.int32)
        stop_ids = frozenset(self._text.special_ids(asked.sampling.stop))
        pictures = tuple(picture.tobytes() for picture in asked.pictures)
        sampled = None if asked.sampled is None else np.frombuffer(asked.sampled.tobytes(), bool)
        try:
            self._engine.submit(
                Request(
                    asked.id, asked.seed, tokens, asked.sampling, asked.stream, asked.known, stop_ids,
                    pictures=pictures, sampled=sampled, unread=asked.unread,
                )
            )  # fmt: skip
        except RequestError as error:
            return _refused(asked.id, str(error))
        self._open[asked.id] = time.monotonic()
        return None

    def has(self, id: int) -> bool:
        """The turn is being answered."""
        return id in self._open

    def drop(self, id: int) -> bool:
        """Nobody waits for the turn any more. False where it is none that is being answered."""
        if self._open.pop(id, None) is None:
            return False
        self._engine.abort(id)
        return True

    def take(self, result: Completion | Refusal) -> Generated | None:
        """The engine is done with a request; None where that is no turn."""
        since = self._open.pop(result.number, None)
        if since is None:
            return None
        if isinstance(result, Refusal):
            return _refused(result.number, result.reason)
        versions = result.versions
        return Generated(
            id=result.number,
            answer=as_bytes(pack_answer(result, result.finish, time.monotonic() - since)),
            oldest=int(versions.min()) if versions.size else UNSAMPLED,
            newest=int(versions.max()) if versions.size else UNSAMPLED,
        )


def _refused(id: int, reason: str) -> Generated:
    return Generated(id=id, answer=as_bytes(b""), oldest=UNSAMPLED, newest=UNSAMPLED, error=reason[:340])
