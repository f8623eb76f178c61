"""The broker's clock, by which leases, silence and stalls are measured."""

from __future__ import annotations

import time

_AHEAD = time.time() - time.monotonic()


def now() -> float:
    """Seconds, read as wall-clock time was when this process started; setting the machine's clock does not move it.

    A deadline of a clock that is set back would hold a dead rollout's work for as long as the clock was moved.
    """
    return _AHEAD + time.monotonic()
