"""Names in the memory that processes of one host share."""

from __future__ import annotations

import hashlib
import secrets
import tempfile
from pathlib import Path

PREFIX = "penstock-"
NONCE_BYTES = 16
SEGMENTS = 4
"""Segments that have a name at once; where all are in use, the oldest loses its name and lives on with its readers."""


def directory() -> Path:
    """The memory file system, or the next best thing where there is none."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


def new_name(run_key: str, kind: str = "") -> str:
    """A name in `directory` that nothing has yet, for a segment or another ``kind`` of file of a run."""
    return f"{_prefix(run_key)}{kind}{secrets.token_hex(6)}"


def is_ours(name: str) -> bool:
    """Whether ``name``, which a peer has sent, can be one that `new_name` gave."""
    return "/" not in name and name.startswith(PREFIX)


class Probe:
    """A nonce in a file of its own: who can read it shares this host's memory."""

    def __init__(self, run_key: str) -> None:
        self.nonce = secrets.token_hex(NONCE_BYTES)
        self.name = new_name(run_key, "probe-")
        self._path = directory() / self.name
        self._path.touch(0o600, exist_ok=False)
        self._path.write_text(self.nonce)

    def unlink(self) -> None:
        """Removes it."""
        self._path.unlink(missing_ok=True)


def read_probe(name: str) -> str:
    """The nonce in the probe ``name``; empty where this process does not see it."""
    if not is_ours(name):
        return ""
    try:
        return (directory() / name).read_text()[: 2 * NONCE_BYTES]
    except OSError:
        return ""


def remove_leftovers(run_key: str) -> None:
    """Removes the segments that a dead trainer of this run has left."""
    for path in directory().glob(f"{_prefix(run_key)}*"):
        path.unlink(missing_ok=True)


def _prefix(run_key: str) -> str:
    # A digest of the key: names are for every process of this host to see, the key is not.
    return f"{PREFIX}{hashlib.sha256(run_key.encode()).hexdigest()[:16]}-"
