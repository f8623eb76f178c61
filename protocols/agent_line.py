"""An agent's line to a gateway: where one is, what is asked again, and what it refuses. Imports no torch."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import secrets
import sys
import threading
import time
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from penstock.protocols import messages as m
from penstock.protocols.keys import ClientKeys, load_client
from penstock.protocols.mailbox import LATE_S, DeadlineError, Mailbox, answer_to, incarnation_of
from penstock.protocols.run_lock import came_to, holder, is_of_before

BEAT_S = 3.0
LOOK_S = 2.0
"""Between two looks at whether the run is over, while an answer is waited for."""
START_S = 120.0
"""How long a client waits for a run to be under way."""
TELL_S = 3.0
"""After which it says that it waits."""
QUIET_S, FIRST_S = 8.0, 3.0
"""A gateway that has said nothing for so long since it was first asked may never; and how long it may then wait for a
task before it says that there is none."""


class AgentRefusedError(RuntimeError):
    """What the gateway says no to. ``code`` is for programs: ``no_session``, ``unknown_session``, ``session_lost``,
    ``run_over``, …; docs/agents.md has all."""

    def __init__(self, refusal: m.AgentRefused) -> None:
        super().__init__(f"{refusal.reason} [{refusal.code}]")
        self.status, self.code, self.retry_s = refusal.status, refusal.code, refusal.retry_s

    @property
    def lost(self) -> bool:
        """The session that was spoken of is nobody's here any more, so that it cannot be given back."""
        return self.code in ("session_lost", "unknown_session", "run_over")


class RunOver(AgentRefusedError):
    """The run has ended: there is nothing left to do."""


class Line:
    """A connection to one gateway, with its answers as futures."""

    def __init__(self, gateway: str | Path, address: str, keys: ClientKeys | None) -> None:
        self.folder = _folder(gateway)
        self._mailbox = Mailbox(address, incarnation_of(f"agent-{secrets.token_hex(4)}"), keys)
        self._mailbox.beat_s, self._mailbox.beat = BEAT_S, lambda: m.AgentBeat(sessions=list(self.sessions))
        self.sessions: set[str] = set()
        """Those that are open: said with every heartbeat."""
        self._numbers = itertools.count()
        self._name = secrets.token_hex(8)
        self._quiet: threading.Timer | None = None

    def ask(self, message: m.Message, deadline_s: float) -> Future[m.Message]:
        """What is answered, as a future. Where the gateway is silent from the first on, that is told on stderr."""
        if self._quiet is None:
            self._quiet = threading.Timer(QUIET_S, self._tell_quiet)
            self._quiet.daemon = True
            self._quiet.start()
        return self._mailbox.ask_later(message, deadline_s)

    def patience(self, most_s: float) -> float:
        """Seconds that the gateway may wait before it answers: of one that was never heard of ``most_s`` is long."""
        return min(most_s, FIRST_S) if self._mailbox.unheard else most_s

    def _tell_quiet(self) -> None:
        if words := self._mailbox.unheard:
            sys.stderr.write(f"waiting for the gateway at {self._mailbox.address}: it {words}\n")

    def take(self, session: str) -> None:
        """Says that it is open here, at once and with every heartbeat."""
        self.sessions.add(session)
        self._mailbox.tell(m.AgentBeat(sessions=[session]))

    def request(self) -> str:
        """A name for a request, which no other has."""
        return f"{self._name}-{next(self._numbers)}"

    def check_over(self) -> None:
        """Raises `RunOver` where the run's folder says that it has ended: nobody is left to answer."""
        if self.folder and came_to(self.folder) is not None and not list(self.folder.glob("gateways/*.json")):
            raise _over(self.folder)

    def say(self, message: m.Message, deadline_s: float) -> Any:
        """What is answered. Where the gateway says that it may be asked again, it is, as long as there is time."""
        deadline, said = time.monotonic() + deadline_s, None
        while True:
            asked = self.ask(message, deadline - time.monotonic())
            while not wait([asked], LOOK_S).done and time.monotonic() < deadline + LATE_S:
                self.check_over()
            said = _said(asked, said)
            if (pause := _pause(said, deadline)) is None:
                return checked(said)
            time.sleep(pause)

    async def say_async(self, message: m.Message, deadline_s: float) -> Any:
        """The same, for asyncio."""
        deadline, said = time.monotonic() + deadline_s, None
        while True:
            asked = self.ask(message, deadline - time.monotonic())
            waited = _for_asyncio(asked)
            while not (await asyncio.wait([waited], timeout=LOOK_S))[0] and time.monotonic() < deadline + LATE_S:
                self.check_over()
            said = _said(asked, said)
            if (pause := _pause(said, deadline)) is None:
                return checked(said)
            await asyncio.sleep(pause)

    def close(self) -> None:
        """Hangs up."""
        if self._quiet:
            self._quiet.cancel()
        self._mailbox.close()


def _folder(gateway: str | Path) -> Path | None:
    return None if "://" in str(gateway) else Path(gateway)


def loaded(keys: ClientKeys | str | Path | None) -> ClientKeys | None:
    """Those that a client was given, or the file that has them. Raises `KeysError`."""
    return load_client(Path(keys)) if isinstance(keys, str | Path) else keys


class Search:
    """For one of the gateways of a run, which the run's folder names once it is under way, or the one at an address."""

    def __init__(self, gateway: str | Path, keys: ClientKeys | None) -> None:
        self._gateway, self._keys, self._told = gateway, keys, False
        self._began = self._since = time.monotonic()

    def look(self) -> Line | None:
        """To the gateway; None where there is none yet, which is said once, on stderr, after `TELL_S`. Raises
        `RunOver`, or `FileNotFoundError` `START_S` after the search began, or, of a run that `penstock run` prepares
        on this machine, after that was done; at once where there is no folder in which the first run
        would make that around its own."""
        if (folder := _folder(self._gateway)) is None:
            return Line(self._gateway, str(self._gateway), self._keys)
        if files := sorted((folder / "gateways").glob("*.json")):
            own = folder / "keys" / "client.json"
            keys = self._keys or (load_client(own).to_reach() if own.is_file() else None)
            return Line(self._gateway, json.loads(random.choice(files).read_text())["zmq"], keys)
        summary = came_to(folder)
        if summary is not None and summary.get("outcome") != "interrupted":  # such a one may go on
            raise _over(folder)
        whole = folder.absolute()
        if not folder.is_dir() and not folder.parent.is_dir() and not whole.parent.parent.is_dir():
            raise FileNotFoundError(f"{whole}: no such folder, nor is {whole.parent.parent} one; give a run's folder")
        if preparing := _is_prepared(folder):
            self._since = time.monotonic()
        if time.monotonic() - self._since > START_S:
            raise FileNotFoundError(
                f"{whole}/gateways: no gateway for {START_S:g} s; is it the folder of a run with gateway.count above "
                "0, under way?"
            )
        if time.monotonic() - self._began > TELL_S and not self._told:
            self._told = True
            why = "none is there yet" if folder.is_dir() else "no such folder"
            how = "while the run is prepared" if preparing else f"up to {START_S:g} s"
            sys.stderr.write(f"waiting {how} for a gateway in {whole}: {why}\n")
        return None


def _is_prepared(folder: Path) -> bool:
    """A `penstock run` of this machine is at work there, and its broker is not there yet: as long as a model's warm
    start takes."""
    address = folder / "broker.address"
    return holder(folder) is not None and (not address.exists() or is_of_before(folder, address))


def _over(folder: Path) -> RunOver:
    return RunOver(m.AgentRefused(status=410, code="run_over", reason=f"the run in {folder} has ended"))


def _said(asked: Future[m.Message], before: m.Message | None) -> m.Message:
    """The answer. Where none comes in time, what was said ``before``, if anything was: it says why. Raises
    `DeadlineError`."""
    try:
        return answer_to(asked, 0.0)
    except DeadlineError:
        if before is None:
            raise
        return before


def _pause(message: m.Message, deadline: float) -> float | None:
    """Seconds after which the same may be asked again; None where ``message`` is the answer, or time is up."""
    again_s = message.retry_s if isinstance(message, m.AgentRefused) else 0.0
    return again_s if again_s and time.monotonic() + again_s < deadline else None


def checked(message: m.Message) -> Any:
    """The answer. Raises `AgentRefusedError` where it is none."""
    if isinstance(message, m.AgentRefused):
        raise (RunOver if message.code == "run_over" else AgentRefusedError)(message)
    return message


def settled(asked: Future[m.Message], most_s: float) -> Future[m.Message]:
    """``asked``, once it has its answer or never will."""
    wait([asked], most_s)
    return asked


async def answered(asked: Future[m.Message], most_s: float) -> Future[m.Message]:
    """The same, for asyncio."""
    await asyncio.wait([_for_asyncio(asked)], timeout=most_s)
    return asked


def _for_asyncio(asked: Future[m.Message]) -> asyncio.Future[m.Message]:
    waited = asyncio.wrap_future(asked)
    waited.add_done_callback(_heeded)
    return waited


def _heeded(done: asyncio.Future[Any]) -> None:
    """What comes when nobody waits any more, at the end of a client, is nobody's error."""
    if not done.cancelled():
        done.exception()
