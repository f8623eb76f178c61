"""Where a policy is most undecided: Wang et al. 2025, arXiv:2506.01939, eq. 7."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def most_undecided(entropies: Sequence[np.ndarray], masks: Sequence[np.ndarray], share: float) -> list[np.ndarray]:
    """float32 ``[tokens]`` for each trajectory: 1 for the ``share`` (0 to 1) of all tokens where ``masks`` is 1 whose
    entropy is highest, those that tie with the last of them included; at least one. Trajectories lie in lists,
    ``[tokens]`` each.

    >>> most_undecided([np.array([0.0, 0.1, 0.9])], [np.array([0, 1, 1])], 0.5)
    [array([0., 0., 1.], dtype=float32)]
    """
    every = np.concatenate([values[mask == 1] for values, mask in zip(entropies, masks, strict=True)])
    if not len(every):
        return [np.zeros(len(mask), np.float32) for mask in masks]
    position = len(every) - 1 - int(share * (len(every) - 1))
    least = np.partition(every, position)[position]
    return [((values >= least) & (mask == 1)).astype(np.float32) for values, mask in zip(entropies, masks, strict=True)]
