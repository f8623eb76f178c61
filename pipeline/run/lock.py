"""A run's folder belongs to one `penstock run` at a time."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil

from penstock.pipeline.config import ConfigError
from penstock.protocols.run_lock import LOCK, holder, machine, read_summary

RETRY_S = 1.0
LIVE_S = 10.0
LOOK_S = 6.0
"""In which lines of a broker that is at work are seen, from another machine too."""


class HeldError(ConfigError):
    """Somebody else runs in the folder yet."""


@contextmanager
def held(folder: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Nobody else runs in ``folder`` meanwhile; the kernel gives it free when this process ends, however that is.
    Raises `HeldError` where somebody does for ``wait_s`` yet, and `ConfigError` where the lock cannot be written."""
    deadline = time.monotonic() + wait_s
    try:
        opened = (folder / LOCK).open("a+")
    except OSError as error:
        raise ConfigError(f"--resume: cannot write {folder / LOCK}: {error.strerror}") from None
    with opened as file:
        while not _take(file, folder):
            if time.monotonic() >= deadline:
                waited = f", {wait_s:g} s later too" if wait_s else ""
                file.seek(0)
                if file.read().split()[2:] not in ([], [machine()]) and not is_live(folder):
                    raise HeldError(
                        f"--resume: another machine holds {folder / LOCK}{waited}, and no broker of the run is at "
                        "work: it may be beginning there; if that machine is gone (NFSv3 keeps its locks), run: rm "
                        f"{folder / LOCK}"
                    )
                raise HeldError(
                    f"--resume: the run in {folder} is going on already{waited}; watch it with: penstock top {folder}"
                )
            time.sleep(RETRY_S)
        try:
            file.truncate(0)
            file.write(f"{os.getpid()} {psutil.Process().create_time()} {machine()}")
            file.flush()
            os.fsync(file.fileno())  # when it was taken is told by its time, also over NFS, which writes later
        except OSError as error:  # a full disk, say
            raise ConfigError(f"--resume: cannot write {folder / LOCK}: {error.strerror}; free some space") from None
        try:
            yield
        finally:
            file.truncate(0)


def _take(file: IO[str], folder: Path) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system that knows no locks
        return holder(folder) is None and not is_live(folder)
    file.seek(0)
    if (of := file.read().split()[2:]) and of != [machine()] and is_at_work(folder):
        fcntl.flock(file, fcntl.LOCK_UN)  # its locks are each machine's own (BeeGFS, Lustre with localflock)
        return False
    return True


def is_live(folder: Path) -> bool:
    """A broker wrote a line about its actors just now, as it does every second. Takes `LOOK_S` where only looking
    twice can tell."""
    written = _beats(folder)
    if written is None or read_summary(folder) is not None:
        return False
    age = _disk_time(folder) - written.st_mtime
    if age < 0:  # a clock was set back since: that says nothing, and a broker's next line does
        time.sleep(LOOK_S)
        later = _beats(folder)
        return later is None or later.st_size != written.st_size
    return age < LIVE_S


def is_at_work(folder: Path) -> bool:
    """As `is_live`, and never of a run that was killed just now: waits for another line, up to `LIVE_S`."""
    before = _beats(folder)
    while is_live(folder):
        if (now := _beats(folder)) and (before is None or now.st_size != before.st_size):
            return True
        time.sleep(0.2)
    return False


def _beats(folder: Path) -> os.stat_result | None:
    """Of what a broker writes lines into: of the file as it is opened, since NFS has old news of one that is not."""
    try:
        with (folder / "actors.jsonl").open("rb") as file:
            return os.fstat(file.fileno())
    except OSError:
        return None


def _disk_time(folder: Path) -> float:
    """Now, by the clock of whoever has the disk: a shared one's is not this machine's."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            return os.fstat(probe.fileno()).st_mtime
    except OSError:  # it is not to be written to
        return time.time()
