"""One process that runs the user's code, as its parent has it."""

from __future__ import annotations

import contextlib
import io
import os
import selectors
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO, cast

from penstock.protocols.wire import WireError, check
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.processes import raise_file_limit
from penstock.services.user_processes.child import BLOCKED
from penstock.services.user_processes.frames import NOBODY, Mark, frame_size, make_frame, read_frame, write_frame

START_S = 120.0
END_S = 5.0
"""Seconds in which a worker that answers no more is to end; one that has only closed its descriptors would not."""


class ProgramError(SetupError):
    """What the user wrote cannot be loaded; says which and why."""


class WorkerGone(Exception):
    """The worker died, or had to be ended."""


@dataclass(frozen=True)
class Program:
    """What a worker runs."""

    handler: str
    """``module:class`` of ours that calls it: a `child.Handler`, made from this."""
    function: str
    """``module:name`` of the user's."""
    key: str
    """The config key that names it."""
    timeout_s: float
    """Seconds that a call may take."""
    options: dict[str, Any]
    """What it is called with besides."""
    columns: list[str] = field(default_factory=list)
    """What it may ask for beside what every call is offered."""
    also: list[str] = field(default_factory=list)
    """Names of the numbers that it returns beside its first."""
    per_minute: float | None = None
    """Calls that may begin in a minute; None: any number."""


@dataclass(slots=True)
class Call:
    """One call: what the program may be given, by name."""

    offered: dict[str, Any]
    future: Future[Any] = field(default_factory=Future)
    deadline: float = 0.0
    """On the monotonic clock, once it is under way."""
    deaths: int = 0


class Worker:
    """One worker process, its pipes, and the mark that says which call runs. It begins to load its program, for which
    it has ``start_s`` seconds, when this is made: `loaded` waits for that."""

    def __init__(self, program: Program, start_s: float = START_S) -> None:
        self._program, self._start_s = program, start_s
        try:
            check(program.options)
        except WireError as error:
            raise ProgramError(
                f"{program.key}.options: they cannot be told to another process: {error}; give numbers, text, lists, "
                "and maps with text for keys"
            ) from None
        raise_file_limit()  # each has six, and a machine of many cores has many workers
        memory = os.memfd_create("penstock-mark") if hasattr(os, "memfd_create") else _temporary_file()
        os.ftruncate(memory, os.sysconf("SC_PAGESIZE"))
        self._mark = Mark(memory)
        self._mark.set(NOBODY)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "penstock.services.user_processes.child", str(memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=(memory,),
                start_new_session=True,  # so that what it starts can be ended with it
            )
        finally:
            os.close(memory)
        self._calls, self.replies = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)
        self._received = bytearray()
        self._hello: dict[str, Any] | None = None
        self._start_by = time.monotonic() + start_s
        with contextlib.suppress(BrokenPipeError):  # `loaded` says that it has ended
            write_frame(self._calls, asdict(program))

    def loaded(self, patience_s: float) -> bool:
        """Whether its program is loaded, now or within ``patience_s``. Where that cannot be, or takes more than its
        ``start_s``, the process is ended. Raises `ProgramError`, or `ConnectionError` where it may be loaded later: a
        server does not answer, or somebody has killed the process."""
        if self._hello is None:
            hello = self._heard(patience_s)
            if hello is None:
                return False
            if "error" in hello:
                self.kill()
                raise (ConnectionError if hello["passing"] else ProgramError)(hello["error"])
            os.set_blocking(self._calls.fileno(), False)  # a worker that hangs must not hang this process
            self._hello = hello
        return True

    @property
    def asynchronous(self) -> bool:
        """Its program is; waits until that is loaded. Raises as `loaded` does."""
        self.loaded(self._start_s)
        assert self._hello is not None
        return self._hello["asynchronous"]

    @property
    def ended(self) -> bool:
        """It was killed."""
        return self._calls.closed

    def send(self, calls: dict[int, Call], deadline: float) -> None:
        """Begins calls. Raises `WorkerGone`, also where the worker, whose pipe is full, reads nothing until
        ``deadline`` (on the monotonic clock)."""
        assert self._hello is not None
        said = [
            {"id": number, "arguments": {name: call.offered[name] for name in self._hello["asks"]}}
            for number, call in calls.items()
        ]
        left = memoryview(make_frame(said))
        while left:
            try:
                left = left[os.write(self._calls.fileno(), left) :]
            except BlockingIOError:
                if not _ready(self._calls, selectors.EVENT_WRITE, deadline - time.monotonic()):
                    raise WorkerGone(f"timed out after {self._program.timeout_s:g} s") from None
            except BrokenPipeError:
                raise WorkerGone(self._epitaph()) from None

    def read(self) -> list[dict[str, Any]]:
        """What has been answered; blocks where nothing has. Raises `WorkerGone` where nothing will be."""
        data = os.read(self.replies.fileno(), 1 << 16)
        if not data:
            raise WorkerGone(self._epitaph())
        self._received += data
        answers = []
        while (size := frame_size(self._received)) is not None and len(self._received) >= size:
            answers.append(read_frame(io.BytesIO(bytes(self._received[:size]))))
            del self._received[:size]
        return answers

    @property
    def running(self) -> int:
        """The call whose code runs, or ran when the process ended; `NOBODY` where that is not known."""
        return self._mark.read()

    def kill(self) -> None:
        """Ends the process at once, with all that it has started."""
        if self.ended:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended; macOS says the second
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._calls.close()
        self.replies.close()

    def _heard(self, patience_s: float) -> dict[str, Any] | None:
        """What it says once its program is loaded, or cannot be; None where it says nothing within ``patience_s``."""
        why = f"was not imported within {self._start_s:g} s"
        wrong: type[Exception] = ProgramError
        try:
            left = self._start_by - time.monotonic()
            while _ready(self.replies, selectors.EVENT_READ, min(patience_s, left)):
                if answers := self.read():
                    return answers[0]
            if patience_s < left:
                return None
        except WorkerGone:
            why = "ended while it was imported"
            if self._process.returncode == -signal.SIGKILL:  # by somebody, or for want of memory: no fault of its own
                why, wrong = "was killed while it was imported", ConnectionError
        self.kill()
        raise wrong(f"{self._program.key}: {self._program.function} {why}; stderr may say more")

    def _epitaph(self) -> str:
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return "closed the pipe of its answers, and did not end"
        if code == BLOCKED:
            return f"blocked the event loop for {self._program.timeout_s:g} s"
        return f"crashed with exit code {code}"


def _ready(file: BinaryIO, event: int, patience_s: float) -> bool:
    """Whether ``file`` can be read, or written, within ``patience_s``, whatever its descriptor's number."""
    with selectors.DefaultSelector() as selector:
        selector.register(file, event)
        return bool(selector.select(max(0.0, patience_s)))


def _temporary_file() -> int:
    import tempfile

    file, name = tempfile.mkstemp()
    os.unlink(name)  # noqa: PTH108
    return os.dup(file)
