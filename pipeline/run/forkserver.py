"""The process that has loaded what most actors need, and forks them: `python -m penstock.pipeline.run.forkserver FD`.

Loading torch and transformers takes seconds of every process that computes. Here one process does it, once a run, and
each actor begins as its copy. It never touches a GPU and has one thread, so that a fork of it is whole. It speaks with
the supervisor alone, in JSON over a Unix socket; the supervisor's side is `pipeline.run.forking`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any

from setproctitle import setproctitle

from penstock.services.runtime.processes import with_parent

MESSAGE_BYTES = 1 << 20
_LOADED = (
    "torch",
    "transformers",
    "penstock.services.rollout.service",
    "penstock.services.reference.service",
    "penstock.services.trainer.service",
    "penstock.pipeline.cli",
)


def main() -> None:
    """Forks what it is asked for until the supervisor closes the socket, or is gone. Returns in a child: as the
    command that it was asked to be."""
    control = socket.socket(fileno=int(sys.argv[1]))
    setproctitle("penstock: actors are forked from this process, which has torch and transformers loaded")
    for name in _LOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page that it looks at
    wake, waker = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([control.fileno(), wake], [], [])
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
            _tell_ends(control)
        if control.fileno() not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 2)
        if not data:
            return
        request = json.loads(data)
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            os.close(wake)
            os.close(waker)
            _become(request, fds)
            return
        descriptor = os.pidfd_open(child)  # here, where it is not reaped before: its number is nobody else's yet
        socket.send_fds(control, [json.dumps({"pid": child}).encode()], [descriptor])
        for fd in (*fds, descriptor):
            os.close(fd)


def _tell_ends(control: socket.socket) -> None:
    """Says how children ended: below zero by which signal, else their exit code."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        control.send(json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """This process, just forked, is the command that was asked for, as if it had been started."""
    import numpy
    import torch

    from penstock.pipeline import cli

    os.setsid()
    stdin, output = fds
    for source, target in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(stdin)
    os.close(output)
    if request["with_parent"] and (ask := with_parent()):
        ask()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
    numpy.random.seed()  # Python's own generator does so by itself
    setproctitle(" ".join(request["command"]))
    sys.argv = ["penstock", *request["arguments"]]
    cli.main()


if __name__ == "__main__":
    main()
