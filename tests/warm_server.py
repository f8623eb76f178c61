"""What `tests/warm.py` starts: a fork server whose children are commands, each with a fork server of its own beside it
that has loaded everything too."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from penstock.pipeline import cli
from penstock.pipeline.run import forking, forkserver

LOADED = ("datasets", "penstock.pipeline.run.start", "penstock.pipeline.page.build")
"""What looks before a run, and its start and end, load beside what the fork server does."""

become_actor = forkserver._become


class Beside:
    """The fork server of a command, with the part of `subprocess.Popen` that `ForkServer` uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        os.kill(self.pid, 9)

    def wait(self, seconds: float = 60.0) -> int:
        until = time.monotonic() + seconds
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("fork server", seconds)
            time.sleep(0.01)
        return ended[1]


def become_command(request: dict[str, Any], fds: list[int]) -> None:
    """Forks the fork server that the command may ask for, and becomes the command."""
    forkserver._become = become_actor
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        for fd in fds:
            os.close(fd)
        become_fork_server(theirs)
        sys.exit()
    theirs.close()

    def first(command: list[str], *, stdout: IO[bytes], pass_fds: tuple[int], **others: Any) -> Any:
        forking.subprocess = subprocess  # type: ignore[assignment]
        socket.send_fds(ours, [b"begin"], [pass_fds[0], stdout.fileno()])
        ours.close()
        return Beside(pid)

    names = {**vars(subprocess), "Popen": first}
    forking.subprocess = SimpleNamespace(**names)  # type: ignore[assignment]
    if path := request["env"].pop("PENSTOCK_TESTS_STDERR", None):
        say_apart(path)
    become_actor(request, fds)


def say_apart(path: str) -> None:
    """The command's stderr goes to this file."""
    command = cli.main

    def main() -> None:
        with Path(path).open("wb") as stderr:
            os.dup2(stderr.fileno(), 2)
        command()

    cli.main = main


def become_fork_server(asked: socket.socket) -> None:
    """One as `penstock run` starts it, once it is asked for; returns where it never was."""
    told, fds, _, _ = socket.recv_fds(asked, 16, 2)
    asked.close()
    if not told:
        return
    os.setsid()
    os.dup2(fds[1], 1)
    os.dup2(fds[1], 2)
    os.close(fds[1])
    sys.argv[1] = str(fds[0])
    forkserver.main()


if __name__ == "__main__":
    del sys.path[0]  # the tests' folder, which `penstock` would not have there
    for name in LOADED:
        importlib.import_module(name)
    forkserver._become = become_command
    forkserver.main()
