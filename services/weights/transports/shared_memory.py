"""Names in the memory that processes of one host share."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import tempfile
from pathlib import Path

PREFIX = "penstock-"
NONCE_BYTES = 16
PROBE = "probe-"
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
    """A nonce in a file of its own: who can read it shares this host's memory. It is locked as long as this process
    lives, by which the run's segments are known to be in use."""

    def __init__(self, run_key: str) -> None:
        self.nonce = secrets.token_hex(NONCE_BYTES)
        self.name = new_name(run_key, PROBE)
        self._path, self._file = directory() / self.name, -1
        self.renew()

    def renew(self) -> None:
        """Writes it again where its name is gone: whoever cleans up the memory file system may have taken it."""
        if self._path.exists():
            return
        self._close()
        # Renamed once it is locked: nobody sees one that is not, and takes it for a dead trainer's.
        new = self._path.with_name(self.name.replace(PROBE, "new-"))
        self._file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        os.write(self._file, self.nonce.encode())
        new.rename(self._path)

    def unlink(self) -> None:
        """Removes it."""
        self._path.unlink(missing_ok=True)
        self._close()

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def read_probe(name: str) -> str:
    """The nonce in the probe ``name``; empty where this process does not see it."""
    if not is_ours(name):
        return ""
    try:
        return (directory() / name).read_text()[: 2 * NONCE_BYTES]
    except OSError:
        return ""


def remove_leftovers(run_key: str) -> None:
    """Removes the segments that a dead trainer of this run has left; none while another one of it is at work here."""
    mine = list(directory().glob(f"{_prefix(run_key)}*"))
    if not any(PROBE in path.name and _is_held(path) for path in mine):
        for path in mine:
            path.unlink(missing_ok=True)


def bytes_of(run_key: str) -> int:
    """What the segments of this run take here."""
    return sum(_bytes(path) for path in directory().glob(f"{_prefix(run_key)}*"))


def held_by_nobody() -> dict[str, int]:
    """What trainers that died have left here, of any run: bytes, by the pattern of their names."""
    found: dict[str, list[Path]] = {}
    for path in directory().glob(f"{PREFIX}*-*"):
        found.setdefault(path.name.rpartition(PROBE)[0] or f"{path.name.rpartition('-')[0]}-", []).append(path)
    probes = {prefix: [path for path in paths if PROBE in path.name] for prefix, paths in found.items()}
    return {
        f"{directory() / prefix}*": sum(map(_bytes, paths))
        for prefix, paths in found.items()
        if probes[prefix] and not any(map(_is_held, probes[prefix]))
    }


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:  # it has just gone
        return 0


def _is_held(probe: Path) -> bool:
    try:
        with probe.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return probe.exists()  # another user's, which nobody else may look at
    return False


def _prefix(run_key: str) -> str:
    # A digest of the key: names are for every process of this host to see, the key is not.
    return f"{PREFIX}{hashlib.sha256(run_key.encode()).hexdigest()[:16]}-"
