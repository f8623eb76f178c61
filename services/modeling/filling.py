"""What fits together."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heappop, heappush

PASSES_EACH = 4
"""Where a model lies on several GPUs, passes for each of them that are begun together: while the first ones and the
last are under way some have nothing to do."""


def fill(sizes: Sequence[int], room: int, multiple: int = 1) -> list[list[int]]:
    """Numbers of ``sizes`` that go together, at most ``room`` in all (a larger one stands alone): in few, by best fit,
    the largest first (Johnson et al. 1974, doi:10.1137/0203025); where ``multiple`` take one each at a time, in a
    multiple of these, of about one size, so that none waits for the others."""
    few = _fitted(sizes, room)
    count = min(-(-len(few) // multiple) * multiple, len(sizes))
    if multiple > 1 and (even := _evened(sizes, room, count)):
        return even
    return few


def _fitted(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Each where it leaves the least room."""
    found: list[list[int]] = []
    left: list[tuple[int, int]] = []
    """Room, and whose it is; ascending."""
    for number in _falling(sizes):
        at = bisect_left(left, (sizes[number], 0))
        if at == len(left):
            found.append([number])
            rest, place = room - sizes[number], len(found) - 1
        else:
            rest, place = left.pop(at)
            found[place].append(number)
            rest -= sizes[number]
        if rest > 0:
            insort(left, (rest, place))
    return [sorted(together) for together in found]


def _evened(sizes: Sequence[int], room: int, count: int) -> list[list[int]] | None:
    """In ``count``, each where there is least yet (Graham 1969, doi:10.1137/0117039); None where that does not fit."""
    found: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, place) for place in range(count)]
    for number in _falling(sizes):
        load, place = heappop(loads)
        if load and load + sizes[number] > room:
            return None
        found[place].append(number)
        heappush(loads, (load + sizes[number], place))
    return [sorted(together) for together in found]


def _falling(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda number: -sizes[number])
