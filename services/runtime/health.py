"""A file that is touched whenever an actor's main loop turns: what a container's health check looks at.

`PENSTOCK_HEALTH_FILE` names it; without that nothing is written.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

VARIABLE = "PENSTOCK_HEALTH_FILE"
EVERY_S = 1.0
AWAY_S = 3.0
"""A heartbeat, or a turn of a loop, that is so late means that this process was stopped."""

_path = Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None
_at = 0.0
_turns = 0


def beat() -> None:
    """Called by the main loop, as often as it likes."""
    global _at, _turns
    _turns += 1
    if _path and time.monotonic() - _at >= EVERY_S:
        _at = time.monotonic()
        _path.touch()


def turns() -> int:
    """How often it was called: a main loop that turns is one that does not hang."""
    return _turns
