"""How the calls of a reward function went, over the whole run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.services.runtime.plain import plain

KINDS = 8
"""Kinds of failures that are told apart; what is rarer is counted as other."""
MOST_KEPT = 2000
"""Characters of what a failure said."""


@dataclass(slots=True)
class Tally:
    """Counts of calls and failures.

    >>> tally = Tally()
    >>> tally.add(8, ["judge timed out after 10 s", "judge timed out after 10 s", "judge raised KeyError: 'a'"])
    >>> tally.words()
    '3 of 8 calls failed: 2 timed out, 1 raised KeyError'
    """

    calls: int = 0
    failed: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    last: str = ""
    """What the last failure said."""

    def add(self, calls: int, errors: Sequence[str]) -> None:
        """So many calls more, with what went wrong."""
        self.calls += calls
        self.failed += len(errors)
        for error in (plain(said[:MOST_KEPT]) for said in errors):
            kind = _kind(error)
            kind = kind if kind in self.kinds or len(self.kinds) < KINDS else "other"
            self.kinds[kind] = self.kinds.get(kind, 0) + 1
            self.last = error

    def row(self) -> dict[str, Any]:
        """As it is written down."""
        return asdict(self)

    def words(self) -> str:
        """For people."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items(), key=lambda item: -item[1]))
        return f"{self.failed} of {self.calls} calls failed: {kinds}"


def _kind(error: str) -> str:
    """``NAME raised KeyError: 'a'`` is a ``raised KeyError``."""
    what = error.partition(" ")[2]
    return re.split(r":| after | for | with ", what)[0].strip() or "failed"
