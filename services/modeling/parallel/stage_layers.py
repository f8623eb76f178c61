"""Which layers each stage of a pipeline has. Imports no torch: a plan asks before there is a model."""

from __future__ import annotations

import itertools


def stage_layers(layers: int, stages: int) -> list[tuple[int, int]]:
    """For each of ``stages`` its first of ``layers``, and the one behind its last: as even as they can be dealt, and
    the last stage, which has the head as well, is among the shorter ones.

    >>> stage_layers(28, 2), stage_layers(5, 2), stage_layers(7, 3)
    ([(0, 14), (14, 28)], [(0, 3), (3, 5)], [(0, 3), (3, 5), (5, 7)])
    """
    each, longer = divmod(layers, stages)
    firsts = [number * each + min(number, longer) for number in range(stages + 1)]
    return list(itertools.pairwise(firsts))
