"""Prompts of several sources, each answered in its own way: in an environment, in another one, or once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.protocols.messages import Lease
from penstock.services.rollout.engines.base import Completion, Refusal
from penstock.services.rollout.group_maker import GroupMaker, Made

FIRST_NUMBER = 1 << 52
"""Of the requests of turns: beyond all that groups are called by, since one engine has both."""


@dataclass(frozen=True)
class Heard:
    """What one of the makers has posted."""

    maker: str
    event: object


def posting(maker: str, post: Callable[[object], None]) -> Callable[[object], None]:
    """``post`` for the maker of this name."""
    return lambda event: post(Heard(maker, event))


class BySource:
    """See `group_maker.GroupMaker`. ``makers`` by the sources whose prompts are theirs, of which the one called "" has
    those of all others; they post with `posting`, and no two of them give the engine the same number."""

    def __init__(self, makers: Mapping[str, GroupMaker]) -> None:
        self._makers = makers

    def start(self, lease: Lease) -> Made | None:
        """See `GroupMaker.start`."""
        return self._makers.get(lease.prompt.source, self._makers[""]).start(lease)

    def has(self, lease: Lease) -> bool:
        """See `GroupMaker.has`."""
        return any(maker.has(lease) for maker in self._makers.values())

    def take(self, result: Completion | Refusal) -> Made | None:
        """See `GroupMaker.take`."""
        made = (maker.take(result) for maker in self._makers.values())  # of all but one it is none of theirs
        return next(filter(None, made), None)

    def heard(self, event: object) -> Made | None:
        """See `GroupMaker.heard`."""
        if not isinstance(event, Heard):
            raise TypeError(f"unexpected event {type(event).__name__}")
        return self._makers[event.maker].heard(event.event)

    def gauges(self) -> dict[str, float]:
        """See `GroupMaker.gauges`; of all together."""
        found: Counter[str] = Counter()
        for maker in self._makers.values():
            for name, value in maker.gauges().items():
                found[name] += value  # type: ignore[assignment]
        return dict(found)

    def close(self) -> None:
        """See `GroupMaker.close`."""
        for maker in self._makers.values():
            maker.close()
