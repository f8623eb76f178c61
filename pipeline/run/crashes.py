"""What an actor died of, remembered in its run's folder: the same failure twice at the same step is the end."""

from __future__ import annotations

import errno
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.services.runtime.errors import LibraryError
from penstock.services.runtime.files import write_whole
from penstock.services.runtime.plugins import UserCodeError

SOON_S = 600.0
"""Of an actor that knows no step, two deaths within this time count as one place."""
PEERS = re.compile(
    r"closed by peer|reset by peer|broken pipe|remote process|ncclRemote|timed? ?out"
    r"|connection (was )?(refused|reset|closed|lost|aborted|failure)|could not connect|failed to connect",
    re.IGNORECASE,
)
"""What libraries say of another process that is gone or silent."""
PASSING = re.compile(r"free memory on device|error in memory profiling", re.IGNORECASE)
"""What a library says while somebody who has just died, or is about to begin, changes what is free."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass(slots=True)
class Place:
    """Where an actor is."""

    step: int = -1
    """Steps that it knows to be committed; -1: it knows none."""


def again(folder: Path, name: str, error: BaseException, step: int) -> bool:
    """``name`` dies of ``error`` at ``step`` (-1: it knows none), as it did the last time: starting it once more would
    not help. What a peer did (it was silent, or gone) is never such a failure."""
    if not is_own(error):
        return False
    path, said = _path(folder, name), _without_numbers(error)
    try:
        before = json.loads(path.read_text())
    except (OSError, ValueError):
        before = {}
    now = time.time()
    same = before.get("error") == said and before.get("step") == step
    try:
        write_whole(path, json.dumps({"error": said, "step": step, "time": now}))
    except OSError:
        pass  # a full disk, say: then it is told of as such
    return same and (step >= 0 or now - before["time"] < SOON_S)


def forget(folder: Path) -> None:
    """Somebody starts the run anew, perhaps with the cause mended."""
    for path in _path(folder, "*").parent.glob("*.crash.json"):
        path.unlink(missing_ok=True)


def disk_is_full(error: BaseException) -> bool:
    """``error`` says that nothing can be written."""
    return (isinstance(error, OSError) and error.errno in FULL) or "No space left on device" in str(error)


def _path(folder: Path, name: str) -> Path:
    return folder / "logs" / f"{name}.crash.json"


def is_own(error: BaseException) -> bool:
    """It comes of the user's code, or of a library's that was given what it cannot take; not of another process."""
    if isinstance(error, UserCodeError):
        return True
    if isinstance(error, ConnectionError | TimeoutError):
        return False
    if isinstance(error, LibraryError):
        return not (PEERS.search(str(error)) or PASSING.search(str(error)))
    kinds = type(error).__mro__
    if any(kind.__module__.partition(".")[0] in ("penstock", "redis", "zmq") for kind in kinds):
        return False
    return not any(kind.__name__ == "DistError" for kind in kinds) and not PEERS.search(str(error))


def _without_numbers(error: BaseException) -> str:
    """Addresses, sizes and counts differ from time to time."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", f"{type(error).__name__}: {error}")[:2000]
