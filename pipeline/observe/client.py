"""Looking at a run from outside: `penstock status` and `penstock top`."""

from __future__ import annotations

import os
import shlex
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.pipeline.config import ConfigError
from penstock.pipeline.observe.terminal import View
from penstock.pipeline.run.folder import address_of, client_file
from penstock.protocols.connection import is_address
from penstock.protocols.keys import ClientKeys, load_client
from penstock.protocols.mailbox import DeadlineError, Mailbox, RefusedError, incarnation_of
from penstock.protocols.messages import ENDED, Bye, Heartbeat, Hello, Status, StatusRequest
from penstock.protocols.run_lock import holder

DEADLINE_S = 5.0
SILENT_S = 60.0
EVERY_S = 1.0


def find_broker(run: Path | None, broker: str | None, keys: Path | None) -> tuple[str, Path | None, Path | None]:
    """The broker's address, the keys to speak to it with, if there are any, and the run's folder, where that has named
    it. Raises `ConfigError`, and `SilentError` where none has listened yet."""
    named = run if broker is None else None
    if run is None and broker is None:
        raise ConfigError("give a run's folder, or the broker's address with --broker, e.g. tcp://127.0.0.1:5555")
    if broker is None:
        assert run
        if not run.is_dir():
            raise ConfigError(f"RUN: no such folder: {run}")
        broker = address_of(run)
        if broker is None:
            if (run / "config.yaml").is_file():
                raise SilentError(f"RUN: no broker has listened for {run} yet; {_silent(keys, run)}")
            raise ConfigError(f"RUN: no broker has ever listened for {run}; is it a run's folder?")
    elif not is_address(broker):
        raise ConfigError(f"--broker: {broker!r} is not an address such as tcp://127.0.0.1:5555")
    if keys is None and run:
        keys = client_file(run)
    return broker, keys, named


def join(broker: str, keys: ClientKeys | None) -> Mailbox:
    """A mailbox of an observer that the broker has let in; whoever asks for it closes it. Raises `DeadlineError`."""
    name = f"observer-{socket.gethostname()}-{os.getpid()}"
    mailbox = Mailbox(broker, incarnation_of(name), keys)
    hello = Hello(kind="observer", name=name, host=socket.gethostname(), pid=os.getpid())
    mailbox.hello = lambda: [hello]
    mailbox.beat = Heartbeat
    try:
        mailbox.ask(hello, DEADLINE_S)
    except BaseException:
        mailbox.close()
        raise
    return mailbox


@contextmanager
def watching(broker: str, keys: Path | None, run: Path | None = None) -> Iterator[Mailbox]:
    """A mailbox of an observer that the broker, of the run in the folder ``run``, has let in. Raises
    `SilentError` where it does not answer, whoever watches included, and `ConfigError` where it refuses."""
    try:
        with closing(join(broker, load_client(keys) if keys else None)) as mailbox:
            yield mailbox
            mailbox.tell(Bye(reason="has seen enough"))
    except DeadlineError:
        raise SilentError(f"no broker answers at {broker} within {DEADLINE_S:g} s; {_silent(keys, run)}") from None
    except RefusedError as refused:
        raise ConfigError(f"the broker at {broker} refuses: {refused}") from None


def _silent(keys: Path | None, run: Path | None) -> str:
    """Why a broker may be silent, and what to do."""
    if run and holder(run):
        return f"penstock run is at work in {run}: the run begins or ends, or its broker is busy; ask again"
    if run:
        return f"where nobody is at work in {run} any more, go on with: penstock run --resume {shlex.quote(str(run))}"
    if keys:
        return f"are the keys in {keys} those of this run?"
    return (
        "the run may be ending, or over (penstock status RUN). Beyond the loopback a broker speaks only to --keys "
        "FILE, the run's keys/client.json"
    )


class SilentError(ConfigError):
    """No broker answers: there is none yet, or none any more."""


class AnotherRunError(ConfigError):
    """Where a run's broker was, another run's is now."""


def state(mailbox: Mailbox, run: Path | None = None, whole: bool = False) -> dict[str, Any]:
    """The run as it is now (`protocols.messages.Status`; ``whole`` as in `StatusRequest`). Raises `DeadlineError`, and
    `AnotherRunError` where it is not the one in the folder ``run``."""
    status = mailbox.ask(StatusRequest(whole=whole), DEADLINE_S)
    assert isinstance(status, Status)
    if run and (name := run / "run.name").is_file() and name.read_text().strip() != status.state["run"]:
        raise AnotherRunError(
            f"RUN: the broker at {mailbox.address} is of another run by now, {status.state['run']}; the one in {run} "
            f"goes on by: penstock run --resume {shlex.quote(str(run))}, with a broker.bind that nobody has"
        )
    return status.state


def follow(
    console: Console,
    broker: str,
    keys: Path | None,
    run: Path | None = None,
    over: Callable[[], bool] = lambda: False,
) -> None:
    """Shows the run until it is over, as the broker or ``over`` says. Raises `ConfigError` where the broker was silent
    for too long, or is of another run."""
    with watching(broker, keys, run) as mailbox:
        now = state(mailbox, run)
        heard = time.monotonic()
        with View(console, f"penstock {now['run']}") as view:
            while True:
                view.update(now, now["restarts"])
                if now["phase"] in ENDED:
                    return
                time.sleep(EVERY_S)
                try:
                    now, heard = state(mailbox, run), time.monotonic()
                except AnotherRunError:
                    if over():
                        return
                    raise
                except DeadlineError as late:
                    if over():
                        return
                    if time.monotonic() - heard > SILENT_S:
                        raise ConfigError(f"{late}; did the run end? penstock status RUN says so") from None
                    view.note(f"the broker at {broker} does not answer: the run is ending, or the broker is; waiting …")
