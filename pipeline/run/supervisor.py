"""Child processes: started, watched, started again with backoff, and ended without leaving one behind."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from penstock.pipeline.run import torchrun
from penstock.pipeline.run.forking import Forked, ForkError, ForkServer
from penstock.services.runtime.errors import EXIT_SETUP
from penstock.services.runtime.plain import plain
from penstock.services.runtime.processes import with_parent

log = structlog.get_logger()

BACKOFF_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
LEAVE_S = 5.0
"""An actor that ended in good order is started again after this, if the run goes on."""
WEDGED_S = 30.0
"""A younger process does not count as wedged."""
LATELY_S = 24 * 3600.0
"""What died earlier does not count any more."""
TAIL = 64 << 10
"""Bytes of what a process wrote in which its last words are looked for."""
SETTLED_S = 60.0
"""A process that lived this long starts its backoff anew."""


@dataclass
class Child:
    """One supervised process."""

    name: str
    command: list[str]
    env: dict[str, str]
    stderr: Path
    restartable: bool
    foreign: bool = False
    """Not an actor of ours: it does not watch its stdin for the supervisor's end."""
    preloaded: bool = False
    """It may be forked from a process that has loaded torch and transformers."""
    folder: Path | None = None
    """Where it starts; None: where the supervisor did."""
    process: subprocess.Popen[bytes] | Forked | None = None
    started_at: float = 0.0
    said_before: int = 0
    """Bytes of `stderr` that processes before this one wrote."""
    restarts: int = 0
    died: deque[float] = field(default_factory=deque)
    """When, lately."""
    died_of: str = ""
    """How it ended the last time, and its last words."""
    wedged: bool = False
    """It was ended, since the broker had lost it."""
    failures: int = 0
    """Deaths in quick succession."""
    start_again_at: float | None = None
    held: bool = False
    """It is not started again yet, also where that has come."""
    starting: threading.Lock = field(default_factory=threading.Lock)
    """Held while it is started again."""
    leaving: bool = False
    """It ended with exit code 0, and is started again unless the run ends too."""
    done: bool = False
    """It ended with exit code 0."""
    fatal: str | None = None
    """Why it is not started again."""

    @property
    def alive(self) -> bool:
        """The process runs."""
        return self.process is not None and self.process.poll() is None

    def last_words(self) -> str:
        """The last line it wrote to stderr; its own rather than one of a library that was still cleaning up."""
        try:
            with self.stderr.open("rb") as file:
                file.seek(max(self.said_before, file.seek(0, os.SEEK_END) - TAIL))
                lines = file.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        own = [line for line in lines[-20:] if line.startswith(f"{self.name}: ")]
        return plain((own or lines or [""])[-1])


@dataclass
class Supervisor:
    """The processes of a run."""

    max_restarts: int
    forks: ForkServer | None = None
    children: list[Child] = field(default_factory=list)

    def start(
        self,
        name: str,
        command: list[str],
        stderr: Path,
        env: dict[str, str] | None = None,
        restartable: bool = True,
        pass_fds: tuple[int, ...] = (),
        foreign: bool = False,
        preloaded: bool = False,
        folder: Path | None = None,
    ) -> Child:
        """Starts a process. Its stdin stays open as long as this process lives: its lifeline."""
        # What a cluster says of ranks is of this process: no child is one of those.
        ours = {key: value for key, value in os.environ.items() if key not in torchrun.VARIABLES}
        child = Child(name, command, {**ours, **(env or {})}, stderr, restartable, foreign, preloaded, folder)
        self.children.append(child)
        self._spawn(child, pass_fds)
        return child

    def poll(self, names: set[str] | None = None) -> str | None:
        """Starts again what died and may (of ``names`` alone, if given); returns an error where something cannot go
        on."""
        now = time.monotonic()
        for child in self.children:
            if names is not None and child.name not in names:
                continue
            if child.start_again_at is not None and now >= child.start_again_at:
                with child.starting:
                    if not child.held:
                        child.start_again_at, child.leaving = None, False
                        child.restarts += 1
                        self._spawn(child)
            elif child.process is not None and not child.done and child.start_again_at is None and not child.alive:
                self._died(child, now)
            if child.fatal:
                return child.fatal
        return None

    def end_wedged(self, name: str, silent_s: float) -> None:
        """The broker has lost ``name``, which it last heard so many seconds ago: where that was the process that lives,
        it does not work, and a new one takes its place. One that is still starting was not heard yet."""
        for child in self.children:
            age_s, own = time.monotonic() - child.started_at, child.name == name and not child.foreign
            if own and child.alive and child.process and age_s > max(WEDGED_S, silent_s):
                log.warning("ending a wedged process", child=name, pid=child.process.pid, silent_s=round(silent_s))
                child.process.kill()
                child.wedged = True

    @property
    def restarts(self) -> int:
        """How often processes were started again."""
        return sum(child.restarts for child in self.children)

    def stop(self, grace_s: float, hurry: Callable[[], bool] = lambda: False) -> list[str]:
        """Ends every process, politely, then, after ``grace_s`` or as soon as ``hurry`` says so, by force; returns the
        names of those that needed force."""
        for child in self.children:
            child.start_again_at = None
            if child.alive and child.process:
                child.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while any(child.alive for child in self.children) and time.monotonic() < deadline and not hurry():
            time.sleep(0.02)
        forced = [child for child in self.children if child.alive]
        for child in forced:
            assert child.process
            child.process.kill()
        for child in self.children:
            if child.process:
                child.process.wait()
                if child.process.stdin:
                    child.process.stdin.close()
        if self.forks:
            self.forks.close()
        return [child.name for child in forced]

    def wait(self, names: set[str], deadline_s: float) -> list[str]:
        """Waits for processes to end by themselves; returns those that did not."""
        deadline = time.monotonic() + deadline_s
        chosen = [child for child in self.children if child.name in names]
        while any(child.alive for child in chosen) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [child.name for child in chosen if child.alive]

    def _spawn(self, child: Child, pass_fds: tuple[int, ...] = ()) -> None:
        child.stderr.parent.mkdir(parents=True, exist_ok=True)
        with child.stderr.open("ab") as stderr:
            child.said_before = stderr.tell()
            child.process = self._forked(child, stderr) or subprocess.Popen(
                child.command,
                stdin=subprocess.PIPE,
                stdout=stderr,
                stderr=stderr,
                env=child.env,
                cwd=child.folder,
                pass_fds=pass_fds,
                preexec_fn=with_parent() if child.foreign else None,
                start_new_session=True,  # Ctrl-C is the supervisor's to handle
            )
        child.started_at = time.monotonic()
        log.info("started", child=child.name, pid=child.process.pid, restarts=child.restarts)

    def _forked(self, child: Child, stderr: io.BufferedWriter) -> Forked | None:
        if not child.preloaded or not self.forks or self.forks.dead:
            return None
        try:
            return self.forks.fork(child.command, child.env, stderr, child.foreign)
        except ForkError as error:
            log.warning("processes load for themselves from now on", why=str(error))
            return None

    def _died(self, child: Child, now: float) -> None:
        assert child.process
        code = child.process.returncode
        assert code is not None
        if child.process.stdin:
            child.process.stdin.close()
        if code == 0 and (not child.restartable or child.leaving):
            child.done = True
            log.info("ended", child=child.name)
            return
        if code == 0:  # the run's end, unless the run is still there in a while
            child.leaving, child.died_of = True, "ended with exit code 0"
            child.start_again_at = now + LEAVE_S
            return
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if code == -signal.SIGKILL:
            how += " since it hung" if child.wedged else " (by the system, perhaps, for want of memory: see dmesg)"
        child.wedged = False
        words = child.last_words()
        child.died_of = f"{how}; {words}" if words else how
        log.warning("died", child=child.name, how=how, last_words=words)
        child.died.append(now)
        while child.died[0] < now - LATELY_S:
            child.died.popleft()
        child.failures = 1 if now - child.started_at > SETTLED_S else child.failures + 1
        if code == EXIT_SETUP:
            child.fatal = words or f"{child.name} {how}"
        elif not child.restartable:
            child.fatal = f"{child.name} {how}, and a run cannot go on without it yet; {words}"
        elif len(child.died) > self.max_restarts:
            child.fatal = (
                f"{child.name} {how} after {self.max_restarts} restarts within a day (run.max_restarts); {words}"
            )
        else:
            child.start_again_at = now + BACKOFF_S[min(child.failures, len(BACKOFF_S)) - 1]
