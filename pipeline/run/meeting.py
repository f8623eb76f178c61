"""Where the machines of one learner meet: the first of them hosts, the others find its address in the run's folder."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import structlog

from penstock.services.runtime.errors import SetupError

log = structlog.get_logger()

RETRY_S = 1.0
TELL_EVERY_S = 60.0
CONNECT_S = 2.0


@contextmanager
def meeting(folder: Path, kind: str, host: str, patience_s: float) -> Iterator[tuple[str, bool]]:
    """Of the learner ``kind``: the endpoint, ``address:port``, and whether this process hosts it, at its own address
    ``host``. Who hosts holds a lock until it is left, and the kernel gives that free when its process ends, however
    that is: then whoever comes first is the next. Raises `SetupError` where the host's endpoint does not answer for
    ``patience_s``."""
    path, begun, told = folder / f"{kind}.meeting", time.monotonic(), 0.0
    while True:
        with path.open("a+") as file:
            if _take(file, kind):
                endpoint = f"{host}:{_free_port(host)}"
                file.truncate(0)
                file.write(endpoint)
                file.flush()
                os.fsync(file.fileno())  # for readers on other machines
                yield endpoint, True
                return
            file.seek(0)
            endpoint = file.read().strip()
        if endpoint and _answers(endpoint):
            yield endpoint, False
            return
        waited = time.monotonic() - begun
        if waited > patience_s:
            raise SetupError(
                f"{kind}.nodes: the machine that holds {path} does not answer at {endpoint or 'any address'} for "
                f"{waited:.0f} s; is {kind} at work there, and weights.host a network that both are on?"
            )
        if waited - told > TELL_EVERY_S:
            told = waited
            log.warning("waiting for the machine that hosts", endpoint=endpoint, waited_s=round(waited))
        time.sleep(RETRY_S)


def _take(file: IO[str], kind: str) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise SetupError(
            f"{kind}.nodes: machines meet by a lock in the run's folder, and this file system gives none ({error}); "
            "mount it with locks (Lustre: -o flock), or put the run elsewhere"
        ) from error
    return True


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as found:
        port: int = found.getsockname()[1]
    return port


def _answers(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), CONNECT_S):
            return True
    except OSError:
        return False
