"""Where the machines of one learner meet: the first of them hosts, the others find its address in the run's folder."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO

import structlog
from torch.distributed import DistError, TCPStore

from penstock.services.runtime.errors import SetupError
from penstock.services.weights.transports.broadcast_group import serve_store

log = structlog.get_logger()

RETRY_S = 1.0
TELL_EVERY_S = 60.0
CONNECT_S = 2.0
SETTLE_S = 2.0
"""For another machine, that came at once, to write its own."""
SECRET, WIDTH = re.compile("[0-9a-f]{64}"), 256
"""Of what is written: letters in all."""
ASK_S = 60.0
"""For one answer of the store, as torch has it."""


@contextmanager
def meeting(folder: Path, kind: str, host: str, patience_s: float) -> Iterator[tuple[TCPStore, bytes, bool]]:
    """Of the learner ``kind``: a store that all share, a secret that only readers of the ``folder`` have, and whether
    this process serves the store, at its own address ``host``. Who serves holds a lock until it is left, and the kernel
    gives that free when its process ends, however that is: then whoever comes first is the next. Raises `SetupError`
    where the host's endpoint does not answer for ``patience_s``."""
    path, begun, told = folder / f"{kind}.meeting", time.monotonic(), 0.0
    while True:
        try:
            opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except PermissionError as error:
            raise SetupError(f"{kind}.nodes: {path} is another user's ({error}); join as the run's own user") from None
        with os.fdopen(opened, "r+") as file:
            taken = _take(file, kind)
            # A lock may be each machine's own (BeeGFS, Lustre with localflock): who serves already is joined.
            met = _serving(path)
            if taken and not met:
                os.fchmod(file.fileno(), 0o600)
                store, endpoint = serve_store(host)
                mine = endpoint, secrets.token_hex(32)
                if not (met := _serving(path)):  # nobody has come meanwhile
                    _write(file, *mine)
                    time.sleep(SETTLE_S)
                    if _said(path) != mine:  # of two that came at once the last serves
                        del store
                        continue
                    try:
                        yield store, bytes.fromhex(mine[1]), True
                    finally:
                        with suppress(OSError):
                            if _said(path) == mine:  # it may outlive this by a moment, and is for nobody any more
                                _write(file)
                    return
        if met:
            yield *met, False
            return
        waited = time.monotonic() - begun
        if waited > patience_s:
            raise SetupError(
                f"{kind}.nodes: the machine that holds {path} does not answer at {_said(path)[0] or 'any address'} for "
                f"{waited:.0f} s; is {kind} at work there, and weights.host a network that both are on?"
            )
        if waited - told > TELL_EVERY_S:
            told = waited
            log.warning("waiting for the machine that hosts", endpoint=_said(path)[0], waited_s=round(waited))
        time.sleep(RETRY_S)


def _said(path: Path) -> tuple[str, str]:
    """The endpoint and the secret of who serves, by the file; empty where it names nobody, or was half written."""
    endpoint, _, secret = path.read_text().strip().partition(" ")
    return (endpoint, secret) if SECRET.fullmatch(secret) else ("", "")


def _write(file: IO[str], endpoint: str = "", secret: str = "") -> None:
    """In one piece, and as long as any other: of two that do so one is there."""
    os.pwrite(file.fileno(), f"{endpoint} {secret}".ljust(WIDTH).encode(), 0)
    os.fsync(file.fileno())  # for readers on other machines


def _serving(path: Path) -> tuple[TCPStore, bytes] | None:
    endpoint, secret = _said(path)
    store = _store_at(endpoint) if endpoint else None
    return (store, bytes.fromhex(secret)) if store else None


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


def _store_at(endpoint: str) -> TCPStore | None:
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), CONNECT_S):
            pass
        return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=ASK_S))
    except (OSError, DistError):
        return None
