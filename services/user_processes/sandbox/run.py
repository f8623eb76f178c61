"""Runs a Python program in a process of its own: bounded in CPU, memory, files and time, and without a network."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

from penstock.services.user_processes.sandbox.child import NO_NAMESPACE, NO_PROCESS

T = TypeVar("T")

CHILD = Path(__file__).with_name("child.py")
OUTPUT_BYTES = 1 << 20
"""Of what a program prints, where no more is asked for."""
START_S = 30.0
"""For processes of others to end, where no more may be started."""
END_S = 5.0
"""For all that a program has started to end."""
REMOVE_S = 30.0
"""For all that it has written to be removed."""
ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OPENBLAS", "OMP", "MKL")}
"""NumPy's libraries start a thread for each core, and each takes of the address space that a program may have."""


class SandboxError(RuntimeError):
    """This machine cannot confine a program; says what to do."""


@dataclass(frozen=True)
class Outcome:
    """What a program came to."""

    completed: bool
    """It ran to its end, tests included, without an exception or an early exit; without tests it may exit with 0."""
    output: str
    """What it printed, its first bytes."""
    timed_out: bool = False
    """It was ended, after the seconds that it had."""


def run(
    program: str,
    tests: str = "",
    stdin: str = "",
    seconds: float = 5.0,
    memory_mb: int = 1024,
    network: bool = False,
    built_in: str = "",
    output_bytes: int = OUTPUT_BYTES,
) -> Outcome:
    """Runs ``program``, then ``tests`` in its names; what ``built_in`` defines both find as they find ``len``.
    ``seconds`` bounds CPU and time, ``memory_mb`` the memory of each of its processes. The program reads what
    this user may, and writes, where the kernel has Landlock, in its folder alone; it reaches no network, unless
    ``network``. Raises `SandboxError` where this machine cannot forbid that, or starts no process for long."""
    return _soon(lambda: _run(program, tests, stdin, seconds, memory_mb, network, built_in, output_bytes))


def _soon(start: Callable[[], T]) -> T:
    """What ``start`` gives. In a container, say, a program may have all processes that there may be: until it ends."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            return start()
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise SandboxError(
                    f"no process could be started within {START_S:g} s: there are as many as there may be (ulimit -u, "
                    "a container's pids_limit)"
                ) from None
        time.sleep(0.1)


def _unnamed() -> IO[bytes]:
    """A file for the output: in its own folder the program could put another in its place, and one of /tmp it could
    not open as /dev/stdout."""
    return os.fdopen(os.memfd_create("output"), "w+b") if sys.platform == "linux" else tempfile.TemporaryFile()


def _run(
    program: str,
    tests: str,
    stdin: str,
    seconds: float,
    memory_mb: int,
    network: bool,
    built_in: str,
    output_bytes: int,
) -> Outcome:
    """As `run`; raises `BlockingIOError` where no process may be started at present."""
    word = secrets.token_bytes(32)
    ours, theirs = socket.socketpair()
    with _folder() as folder, _unnamed() as output, ours:
        file = Path(folder, "program.py")
        for name, text in (("program.py", program), ("tests.py", tests), ("built_in.py", built_in)):
            file.with_name(name).write_text(text)
        numbers = [theirs.fileno(), math.ceil(seconds), memory_mb, network, os.getpid()]
        command = [sys.executable, "-I", str(CHILD), str(file), *map(str, numbers)]
        ours.sendall(word)
        with theirs:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.PIPE, cwd=folder,
                pass_fds=(theirs.fileno(),), start_new_session=True,
                env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder} | ONE_THREAD,
            )  # fmt: skip
        timed_out, errors = False, b""
        try:
            _, errors = process.communicate(stdin.encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _end(process)
        if process.returncode == NO_NAMESPACE:
            raise SandboxError(
                f"this machine lets no process leave the network ({errors.decode(errors='replace')}): allow user "
                "namespaces, take a kernel with Landlock (5.13 and later), or set the option network: true of what "
                "runs the program"
            )
        if process.returncode == NO_PROCESS:
            raise BlockingIOError
        said = b""
        with contextlib.suppress(OSError):  # nothing was said, or it was reset
            ours.setblocking(False)
            said = ours.recv(64)
        printed = os.pread(output.fileno(), output_bytes, 0).decode(errors="replace")
        return Outcome(said == word, printed, timed_out)


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """A folder that goes again, whatever a program has made of it: deeper than Python's recursion, say, or closed."""
    folder = tempfile.mkdtemp(prefix="penstock-code-")
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired, SandboxError):
            for command in (["rm", "-rf"], ["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
                if os.path.lexists(folder):
                    _soon(partial(subprocess.run, [*command, folder], stderr=subprocess.DEVNULL, timeout=REMOVE_S))


def _end(process: subprocess.Popen[bytes]) -> None:
    """With everything that it has started."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):  # what is left where the kernel has no namespace of processes for us
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stderr):
        if stream:
            stream.close()
