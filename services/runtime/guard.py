"""Runs a program that is not ours: it ends with whoever asked for it, and all that it has started with it.

`python -P -m penstock.services.runtime.guard PARENT NAME,NAME PROGRAM ARGUMENT…`: the program has these environment
variables, and no others. PARENT is who asked, by its PID: it may have ended before this module is there. stdin, stdout
and stderr are the program's, and so is the exit code (128 and the signal's number where one ended it). On SIGTERM,
which its parent's end is too, the program has `GRACE_S` to end by itself, for its stdin is closed by then.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from penstock.services.runtime.processes import die_with_parent, with_parent

GRACE_S = 2.0
NOT_FOUND = 127
"""Exit code where there is no such program."""


def guarded(command: Sequence[str], variables: Sequence[str]) -> list[str]:
    """The command that runs ``command`` so, with the environment variables of these names. This process starts it, with
    the whole environment, and in a session of its own, or what ends its parent's ends it too soon."""
    module = "penstock.services.runtime.guard"
    return [sys.executable, "-P", "-m", module, str(os.getpid()), ",".join(variables), *command]


def main(parent: int, variables: list[str], command: list[str]) -> int:
    """Returns the program's exit code."""
    env = {name: os.environ[name] for name in variables if name in os.environ}
    asked: list[float] = []
    heard, told = socket.socketpair()  # of signals, so that none comes between a look and the wait for it
    told.setblocking(False)
    signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: asked.append(time.monotonic()))
    die_with_parent(signal.SIGTERM, parent)
    if asked:
        return 128 + signal.SIGTERM
    try:
        program = subprocess.Popen(command, env=env, preexec_fn=with_parent(signal.SIGKILL), process_group=0)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        return NOT_FOUND
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)  # or nobody would see the program's end by its stdout's
    # Its number stays its own while nobody has waited for it, so that its group can be ended by it.
    while not os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
        left = asked[0] + GRACE_S - time.monotonic() if asked else None
        if left is not None and left <= 0:
            break
        if select.select([heard], [], [], left)[0]:
            heard.recv(64)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the second of those that have ended
        os.killpg(program.pid, signal.SIGKILL)
    code = program.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]))
