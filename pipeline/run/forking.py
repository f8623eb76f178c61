"""The supervisor's side of the fork server: asks for processes, and watches them as if it had started them itself."""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from penstock.pipeline.run.command import arguments_of
from penstock.services.runtime.gpus import visible_gpus

START_S = 60.0
"""For loading torch and transformers, on a busy machine."""
TELL_S = 5.0
"""A process that has ended is told of within this, or its exit code is not known."""


class ForkError(RuntimeError):
    """The fork server does not work any more."""


class Forked:
    """A process of the fork server, with the part of `subprocess.Popen` that a supervisor uses."""

    def __init__(self, server: ForkServer, pid: int, descriptor: int, stdin: IO[bytes]) -> None:
        self.pid, self.stdin = pid, stdin
        self.returncode: int | None = None
        """As Popen's; 1 where the fork server died before it could tell."""
        self._server = server
        self._fd = descriptor
        self._gone_at: float | None = None

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        if self.returncode is None:
            self.returncode = self._look()
            if self.returncode is not None:
                os.close(self._fd)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended; raises `subprocess.TimeoutExpired`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """To this very process: its number may be another's by now."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _look(self) -> int | None:
        code = self._server.code_of(self.pid)
        if code is not None or not select.select([self._fd], [], [], 0)[0]:
            return code
        now = time.monotonic()
        self._gone_at = self._gone_at or now
        return 1 if self._server.dead or now - self._gone_at > TELL_S else None


class ForkServer:
    """The process that forks actors. One that was killed, or is stuck, is done without: `fork` raises, and the
    processes that it has forked go on."""

    PROGRAM = ("-P", "-m", "penstock.pipeline.run.forkserver")

    def __init__(self, stderr: Path) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, *self.PROGRAM, str(theirs.fileno())]
        env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        stderr.parent.mkdir(parents=True, exist_ok=True)
        with theirs, stderr.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=env,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._control = ours
        self._codes: dict[int, int] = {}
        self.dead = False
        """It forks no more."""

    def fork(self, command: list[str], env: dict[str, str], output: io.BufferedWriter, with_parent: bool) -> Forked:
        """Starts ``command``, one of `pipeline.run.command.penstock`'s, with a pipe as its stdin and ``output`` as its
        stdout and stderr; ``with_parent``: it ends with the fork server. Raises `ForkError`."""
        request = {"command": command, "arguments": arguments_of(command), "env": env, "with_parent": with_parent}
        request["cwd"] = str(Path.cwd())
        read, write = os.pipe()
        try:
            if self.dead:
                raise ForkError("the fork server is gone")
            socket.send_fds(self._control, [json.dumps(request).encode()], [read, output.fileno()])
            pid, descriptor = self._answer()
            return Forked(self, pid, descriptor, os.fdopen(write, "wb", 0))
        except (OSError, ForkError) as error:
            os.close(write)
            self.dead = True
            raise ForkError(str(error)) from error
        finally:
            os.close(read)

    def code_of(self, pid: int) -> int | None:
        """The exit code of a process that has ended, where that was told."""
        while not self.dead and pid not in self._codes and select.select([self._control], [], [], 0)[0]:
            self._hear()
        return self._codes.get(pid)

    def close(self) -> None:
        """Ends it."""
        self.dead = True
        self._control.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> tuple[int, int]:
        deadline = time.monotonic() + START_S
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self._control], [], [], left)[0] and (started := self._hear()):
                return started
            if self.dead:
                raise ForkError("the fork server has died")
        self._process.kill()  # or it would fork later what is started in another way by then
        raise ForkError(f"the fork server did not answer within {START_S:.0f} s")

    def _hear(self) -> tuple[int, int] | None:
        """Takes one message; returns number and descriptor of a process that was started."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, 1)
        except OSError:
            data, descriptors = b"", []
        if not data:
            self.dead = True
            return None
        told = json.loads(data)
        if "code" not in told:
            return told["pid"], descriptors[0]
        self._codes[told["pid"]] = told["code"]
        return None


def fork_server(stderr: Path) -> ForkServer | None:
    """One for this machine's actors; None where each loads for itself: beside a GPU, whose driver does not survive a
    fork, and on a system that has no process descriptors (they are Linux's)."""
    return ForkServer(stderr) if can_fork() else None


def can_fork() -> bool:
    """Whether actors of this machine may be forked."""
    if visible_gpus() or not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # a container may forbid it
        return False
    return True
