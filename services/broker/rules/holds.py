"""Who works on what, and until when: the same for leases of rollouts and for offers to scorers.

    free ──take──▶ held ──done──▶ (gone)
      ▲              │
      └── deadline passed, holder gone ──┘

A holder's heartbeats, which say what it works on, put the deadline off. So work whose message was lost is not renewed,
and becomes free again.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key")

SUSPECT_AFTER = 2
"""What was given so often without an answer may be what kills its holders: it is given to one that holds nothing else,
and with few others like it."""


@dataclass(slots=True)
class Hold:
    """One piece of work in somebody's hands."""

    holder: str
    """Identity of the actor."""
    deadline: float
    """Of `clock.now`."""


class Holds(Generic[Key]):
    """Work by key. ``number`` names the group that a key belongs to, as heartbeats do; ``freed`` is told of every piece
    that nobody works on any more though it is not done.

    >>> holds = Holds(lambda key: key, lambda key: print("free again:", key))
    >>> holds.take(7, "rollout-0#1", deadline=30.0)
    >>> holds.renew("rollout-0#1", {7}, deadline=40.0)
    >>> holds.expire(now=35.0)
    []
    >>> holds.expire(now=45.0)
    free again: 7
    [(7, 'rollout-0#1')]
    """

    def __init__(self, number: Callable[[Key], int], freed: Callable[[Key], None]) -> None:
        self._number, self._freed = number, freed
        self.held: dict[Key, Hold] = {}
        self._of: dict[str, set[Key]] = {}
        """Holder to what it works on."""

    def take(self, key: Key, holder: str, deadline: float) -> None:
        """``holder`` works on it."""
        self.done(key)
        self.held[key] = Hold(holder, deadline)
        self._of.setdefault(holder, set()).add(key)

    def holder(self, key: Key) -> str | None:
        """Who works on it."""
        hold = self.held.get(key)
        return hold.holder if hold else None

    def of(self, holder: str) -> list[Key]:
        """What ``holder`` works on."""
        return list(self._of.get(holder, ()))

    def holders(self) -> Set[str]:
        """Everybody who works on something."""
        return self._of.keys()

    def done(self, key: Key) -> None:
        """It is finished, or wanted no more."""
        hold = self.held.pop(key, None)
        if hold:
            mine = self._of[hold.holder]
            mine.remove(key)
            if not mine:
                del self._of[hold.holder]

    def free(self, key: Key) -> None:
        """Whoever works on it does so in vain: it is free again."""
        if key in self.held:
            self._free([key])

    def renew(self, holder: str, numbers: Set[int], deadline: float) -> None:
        """A heartbeat of ``holder``, which works on the groups ``numbers``. Deadlines need not survive a crash: a
        broker that was started again extends them all."""
        for key in self._of.get(holder, ()):
            if self._number(key) in numbers:
                self.held[key].deadline = deadline

    def extend(self, deadline: float) -> None:
        """The broker was away: everybody has at least until ``deadline``."""
        for hold in self.held.values():
            hold.deadline = max(hold.deadline, deadline)

    def release(self, holder: str, but: Set[int] = frozenset()) -> list[Key]:
        """``holder`` is gone, or works on the groups ``but`` alone: returns what is free again."""
        return self._free([key for key in self._of.get(holder, ()) if self._number(key) not in but])

    def expire(self, now: float) -> list[tuple[int, str]]:
        """Work past its deadline is free again; returns each group's number, once, with who held it."""
        late = [(key, hold.holder) for key, hold in self.held.items() if hold.deadline < now]
        self._free([key for key, _ in late])
        return list(dict.fromkeys((self._number(key), holder) for key, holder in late))

    def _free(self, keys: list[Key]) -> list[Key]:
        for key in keys:
            self.done(key)
            self._freed(key)
        return keys
