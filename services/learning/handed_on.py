"""What a user's own command does with every checkpoint (`checkpoint.then`), such as to upload it."""

from __future__ import annotations

import os
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from penstock.services.runtime.checkpoint_folders import path_of, versions
from penstock.services.runtime.guard import guarded
from penstock.services.runtime.user_folders import folder_of, path_with_ours

log = structlog.get_logger()

DONE = ".handed-on"
"""File in a checkpoint that the command is done with: it is not told of it again."""
TRIES, RETRY_S = 3, 30.0
"""For each checkpoint; and between two."""
WORDS = 200
"""Characters of its last line that are told."""
TAIL_BYTES = 4096
"""Of what it has said, that are looked through for them."""


class HandedOn:
    """Runs ``command`` for each checkpoint below ``folder``, one after another, beside training; ``{folder}`` and
    ``{step}`` in its words stand for it. One that was cut off, with this process too, is tried again.

    ``within_s``: seconds that it may take; ``said``: the file that its stdout and stderr go to."""

    def __init__(self, command: Sequence[str], within_s: float, folder: Path, said: Path) -> None:
        self._command, self._within_s, self._folder, self._said = command, within_s, folder, said
        left = versions(folder) if command else []
        self._queue = deque(version for version in left if not (path_of(folder, version) / DONE).exists())
        self._running: tuple[int, subprocess.Popen[bytes]] | None = None
        """The version whose checkpoint the command works on."""
        self._begun = self._again_at = 0.0
        self._tries, self._most_tries = 0, TRIES
        self._failed: dict[int, str] = {}

    @property
    def failed(self) -> str:
        """Why there are checkpoints of this process that it has failed for; empty: there are none."""
        last = next(reversed(self._failed.values()), "")
        return f"{len(self._failed)} of the checkpoints, the last time: {last}" if last else ""

    @property
    def held(self) -> set[int]:
        """Versions whose checkpoints may not be removed."""
        return {self._running[0]} if self._running else set(list(self._queue)[:1])

    @property
    def wanted(self) -> set[int]:
        """Versions whose checkpoints the command is still to have, whole."""
        return self.held | set(self._queue)

    def add(self, version: int) -> None:
        """There is a checkpoint of it, durable."""
        if self._command and version not in self._queue and not (path_of(self._folder, version) / DONE).exists():
            self._queue.append(version)
            self.poll()

    def poll(self) -> bool:
        """Goes on; false: nothing is left to be done. Whatever goes wrong costs no more than what was to be done."""
        if self._running:
            self._look(*self._running)
        if self._running:
            return True
        while self._queue and not path_of(self._folder, self._queue[0]).is_dir():
            log.warning("a checkpoint was removed before checkpoint.then got to it", version=self._queue[0])
            self._next()
        if self._queue and time.monotonic() >= self._again_at:
            self._tries, self._begun = self._tries + 1, time.monotonic()
            try:
                self._running = self._queue[0], self._start(self._queue[0])
            except OSError as error:
                self._fail(f"it cannot be started: {error}")
        return bool(self._queue)

    def hurry(self) -> None:
        """The run is told to stop: none is tried again."""
        self._most_tries, self._again_at = 1, 0.0

    def close(self) -> None:
        """Ends what still runs."""
        if self._running:
            _, program = self._running
            program.terminate()
            program.wait()
            self._running = None

    def _start(self, version: int) -> subprocess.Popen[bytes]:
        told = {"{folder}": str(path_of(self._folder, version).resolve()), "{step}": str(version)}
        words = list(self._command)
        for name, value in told.items():
            words = [word.replace(name, value) for word in words]
        with self._said.open("ab") as said:
            said.write(f"--- step {version}, try {self._tries}\n".encode())
            said.flush()
            # Where its words are files of the user's; the guard ends it with this process.
            return subprocess.Popen(
                guarded(words, list(os.environ)),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                cwd=folder_of(words),
                env={**os.environ, "PATH": path_with_ours()},
                start_new_session=True,
            )

    def _look(self, version: int, program: subprocess.Popen[bytes]) -> None:
        code, took_s = program.poll(), time.monotonic() - self._begun
        if code is None and took_s <= self._within_s:
            return
        if code is None:
            self.close()
        self._running = None
        if code is None:
            self._fail(f"it was not done within {self._within_s:g} s (checkpoint.then_s)")
        elif code:
            self._fail(f"exit code {code}, its last words: {self._last_words()}")
        else:
            with suppress(OSError):  # the command may have moved it away
                (path_of(self._folder, version) / DONE).touch()
            self._failed.pop(version, None)
            log.info("a checkpoint is handed on", version=version, s=round(took_s, 1))
            self._next()

    def _fail(self, why: str) -> None:
        version = self._queue[0]
        log.warning("checkpoint.then failed", version=version, tries=self._tries, why=why)
        self._again_at = time.monotonic() + RETRY_S
        if self._tries >= self._most_tries:
            self._failed[version] = f"step {version}: {why}"
            self._next()

    def _next(self) -> None:
        self._queue.popleft()
        self._tries, self._again_at = 0, 0.0

    def _last_words(self) -> str:
        with suppress(OSError), self._said.open("rb") as said:
            said.seek(-min(said.seek(0, os.SEEK_END), TAIL_BYTES), os.SEEK_END)
            lines = [line.strip() for line in said.read().decode(errors="replace").splitlines() if line.strip()]
            return lines[-1][-WORDS:] if lines and not lines[-1].startswith("---") else "none"
        return "none"
