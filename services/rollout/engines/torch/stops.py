"""Texts and tokens that end answers, looked for at every token without reading all of an answer again."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.services.rollout.engines.base import Request

SPLIT = 3
"""A character has so many bytes behind its first, and each may be a token of its own."""
BROKEN = "\N{REPLACEMENT CHARACTER}"
"""Shown in the place of a part of a character."""


@dataclass(frozen=True, slots=True)
class _Ends:
    """What ends the answers to one request."""

    texts: tuple[str, ...]
    ids: frozenset[int]
    longest: int
    """Bytes of the longest text."""

    def show_in(self, text: str) -> bool:
        return any(stop in text for stop in self.texts)


class Stops:
    """What ends the answers of those requests that have something of their own. ``decode`` turns token ids into
    text."""

    def __init__(self, decode: Callable[[Any], str]) -> None:
        self._decode = decode
        self._ends: dict[int, _Ends] = {}
        """By the request's number."""
        self._shown: dict[int, bool] = {}
        """By token: whether a text shows anything of it."""

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, request: Request) -> None:
        """Its answers are looked at from now on."""
        texts, ids = request.sampling.stop, request.stop_ids
        if texts or ids:
            longest = max((len(text.encode()) for text in texts), default=0)
            self._ends[request.number] = _Ends(texts, ids, longest)

    def drop(self, number: int) -> None:
        """The request is gone."""
        self._ends.pop(number, None)

    def keep(self, numbers: Collection[int]) -> None:
        """All other requests are gone."""
        self._ends = {number: ends for number, ends in self._ends.items() if number in numbers}

    def reached(self, number: int, answer: np.ndarray) -> bool:
        """Whether ``answer``, int32 ``[tokens]``, to request ``number`` has come to its end with its last token."""
        ends = self._ends.get(number)
        if ends is None:
            return False
        if int(answer[-1]) in ends.ids:
            return True
        # A tail may show what the whole does not, which has the last word.
        return ends.show_in(self._tail(answer, ends.longest)) and ends.show_in(self._decode(answer.tolist()))

    def _tail(self, answer: np.ndarray, size: int) -> str:
        """The end of an answer's text: ``size`` bytes or more, behind what being cut off may have changed."""
        most, tail = size + SPLIT + 1, list[int]()  # one more: some leave out a space at the beginning
        for place in reversed(range(len(answer))):
            token = int(answer[place])
            if self._shows(token):  # a byte or more
                tail.insert(0, token)
                if len(tail) == most:
                    break
        text = self._decode(tail)
        while text.startswith(BROKEN) and len(tail) > most - SPLIT:
            del tail[0]  # some show nothing of what stands behind a part of a character
            text = self._decode(tail)
        return text

    def _shows(self, token: int) -> bool:
        if token not in self._shown:
            self._shown[token] = bool(self._decode([token, token]))
        return self._shown[token]
