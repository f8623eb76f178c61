"""Long runs of one token that nobody sampled, such as a picture's places: on a page one of them says how many."""

from __future__ import annotations

import numpy as np

LONG = 16


def folded(tokens: np.ndarray, sampled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which of the ``tokens`` (int32 ``[tokens]``, of which those were ``sampled``, bool) are shown, int64 ``[shown]``,
    and for how many each stands.

    >>> places, counts = folded(np.repeat([5, 7, 9], [2, 20, 1]), np.zeros(23, bool))
    >>> places.tolist(), counts.tolist()
    ([0, 1, 2, 22], [1, 1, 20, 1])
    """
    goes_on = np.zeros(len(tokens), bool)
    goes_on[1:] = (tokens[1:] == tokens[:-1]) & ~sampled[1:] & ~sampled[:-1]
    begins = np.flatnonzero(~goes_on)
    sizes = np.diff([*begins, len(tokens)])
    long = np.repeat(sizes >= LONG, sizes)
    places = np.flatnonzero(~(goes_on & long))
    counts = np.ones(len(tokens), np.int64)
    counts[begins] = np.where(sizes >= LONG, sizes, 1)
    return places, counts[places]
