"""An engine core that answers, and generates nothing though somebody waits: it has lost a request, or cannot place it.

One request that is lost while others go on shows once these have their answers: no more are begun than the bound on lag
allows, so that in the end it is waited for alone.
"""

from __future__ import annotations

LOOKS = 10
"""Of which each may count for so much of its patience, at most."""


class Stall:
    """``patience_s``: how long that may last."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._generated, self._silent_s, self._looked_at = -1, 0.0, 0.0

    def look(self, now: float, generated: int, waiting: int) -> str:
        """What is wrong, or nothing: ``generated`` tokens are there by ``now`` (seconds, of any clock), and so many
        requests are ``waiting``, of which none counts while the core is to stand still."""
        passed_s = min(now - self._looked_at, self._patience_s / LOOKS)  # or this process was stopped meanwhile
        self._looked_at, self._silent_s = now, self._silent_s + passed_s
        if not waiting or generated != self._generated:
            self._generated, self._silent_s = generated, 0.0
        if self._silent_s <= self._patience_s:
            return ""
        return f"no token for {self._silent_s:.0f} s, though its core answers and {waiting} requests wait"
