"""Which server is whose, where there are several rollouts."""

from __future__ import annotations

import fcntl
import hashlib
import time
from pathlib import Path
from typing import IO

import structlog

from penstock.services.runtime import health
from penstock.services.runtime.errors import SetupError

log = structlog.get_logger()

LOCK, LOCK_S = "server-{}.lock", 30.0
"""In the folder, one for each address: the rollout that has a server holds it, and one that was killed may for a while
yet, on a file system of several machines."""


def claim(url: str | list[str], folder: Path) -> tuple[str, IO[str]]:
    """The first address at which no other rollout loads its versions, and the lock that says so. Raises `SetupError`:
    a server that two load versions into has now one's, now the other's."""
    addresses, begun = [url] if isinstance(url, str) else url, time.monotonic()
    while True:
        for address in addresses:
            if lock := _taken(folder / LOCK.format(hashlib.sha256(address.encode()).hexdigest()[:16]), len(addresses)):
                return address, lock
        if time.monotonic() - begun > LOCK_S:
            break
        health.beat()
        time.sleep(1.0)
    raise SetupError(
        f"rollout.engine.options.url: another rollout has {' and '.join(addresses) or 'none'}; name as many servers as "
        "there are rollouts, e.g. [http://127.0.0.1:8000, http://127.0.0.1:8001], or use fewer rollouts"
    )


def _taken(path: Path, choices: int) -> IO[str] | None:
    """The lock, which is this process's now; None where another has it. Raises `SetupError` where nobody can know, and
    there are several ``choices``."""
    lock = path.open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    except OSError as error:  # a file system that knows no locks
        if choices > 1:
            raise SetupError(
                f"rollout.engine.options.folder: {path.parent} is on a file system without locks ({error.strerror}), "
                "by which rollouts share servers out; take another one, or give each rollout one url (penstock join)"
            ) from None
        log.warning("no lock says that this server is one rollout's alone", folder=str(path.parent))
    return lock
