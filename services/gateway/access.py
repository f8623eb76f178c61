"""Who may come in: the run's owner, and agents elsewhere by keys of their own, with what each may take.

A named key is a file ``keys/agents/NAME.json`` of the run's folder, written by ``penstock keys add``. Gateways look
there as they go: a key that is taken away is refused from then on.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import structlog
from pydantic import BaseModel, ConfigDict, Field

from penstock.services.gateway.errors import AgentError
from penstock.services.runtime.files import write_whole

log = structlog.get_logger()

LOOK_S = 1.0
"""Between two looks at the folder of keys."""
MINUTE_S = 60.0


def agents_key(folder: Path) -> str:
    """The owner's key, shown over HTTP: in ``keys/agents.key`` of the run's ``folder``, made once, readable by its
    owner alone."""
    path = folder / "keys" / "agents.key"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        write_whole(path, secrets.token_urlsafe(32) + "\n", mode=0o600)
    return path.read_text().strip()


class NamedKey(BaseModel):
    """A file of ``keys/agents``: what the gateways know of a key that somebody was given."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Of what is shown over HTTP, in hex."""
    curve_public: str = Field("", pattern="^(.{40})?$")
    """Of the pair that opens the ZeroMQ door, in Z85; empty where that asks nobody for keys."""
    sessions: int | None = Field(None, ge=1)
    """Held at once, at each gateway."""
    turns_per_minute: int | None = Field(None, ge=1)
    """Asked of each gateway."""
    expires: datetime | None = None

    @property
    def valid(self) -> bool:
        """It has not expired."""
        return self.expires is None or datetime.now(UTC) < self.expires


def digest(key: str) -> str:
    """What is kept of a key that is shown over HTTP."""
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass(eq=False)
class Visitor:
    """Who asks. ``name`` is empty for the run's owner, who may do everything."""

    name: str = ""
    key: NamedKey | None = None
    _asked: deque[float] = field(default_factory=deque)
    _held: int = 0
    """Bytes of his requests that are being read or answered."""

    def sees(self, owner: str) -> bool:
        """A session that ``owner`` has is his to speak of."""
        return not self.name or self.name == owner

    def check_sessions(self, held: int) -> None:
        """Raises `AgentError` where he has as many as he may."""
        most = self.key.sessions if self.key else None
        if most is not None and held >= most:
            raise AgentError(429, "quota", f"the key {self.name!r} holds {most} sessions at most; end one first", 1.0)

    def check_turns(self) -> None:
        """Raises `AgentError` where one turn more in this minute is too many."""
        most, now = self.key.turns_per_minute if self.key else None, time.monotonic()
        while self._asked and self._asked[0] < now - MINUTE_S:
            self._asked.popleft()
        if most is not None and len(self._asked) >= most:
            left = self._asked[0] + MINUTE_S - now
            raise AgentError(429, "quota", f"the key {self.name!r} may ask for {most} turns a minute", max(left, 1.0))

    def take_turn(self) -> None:
        """One turn more. Raises `AgentError` where that is too many."""
        self.check_turns()
        if self.key and self.key.turns_per_minute:
            self._asked.append(time.monotonic())

    @contextmanager
    def holds(self, size: int, most: int) -> Iterator[None]:
        """A request of ``size`` bytes, while it is in memory. Raises `AgentError` where his have ``most`` already."""
        if self.name and self._held and self._held + size > most:
            told = f"the requests of the key {self.name!r} that wait have {most} bytes at most; ask again"
            raise AgentError(429, "quota", told, 1.0)
        self._held += size
        try:
            yield
        finally:
            self._held -= size


OWNER = Visitor()
WHO: ContextVar[Visitor] = ContextVar("WHO", default=OWNER)
"""Who asks for what is being answered now: set at the door, read at the desk."""


class Access:
    """The keys of the run in ``folder``. ``required``: over HTTP nobody comes in without one."""

    def __init__(self, folder: Path, required: bool) -> None:
        self._folder, self.required = folder / "keys" / "agents", required
        self._owner = agents_key(folder) if required else None
        self._visitors: dict[str, Visitor] = {}
        self._looked_at = float("-inf")

    def by_bearer(self, shown: str) -> Visitor:
        """Who shows this over HTTP. Raises `AgentError`."""
        mine = digest(shown)
        if (found := self._find(lambda key: hmac.compare_digest(key.sha256, mine))) is not None:
            return found
        if self._owner is not None and not hmac.compare_digest(shown.encode(), self._owner.encode()):
            raise AgentError(
                401, "wrong_key",
                "Authorization: give the key of the run's folder, keys/agents.key, or one of `penstock keys add`",
            )  # fmt: skip
        return OWNER

    def by_curve(self, public: str) -> Visitor:
        """Who has proved to hold this key's secret. Raises `AgentError`."""
        if (found := self._find(lambda key: key.curve_public == public)) is None:
            raise AgentError(401, "wrong_key", "the key is not known any more: it was taken away, or has expired")
        return found

    def admits(self, public: str) -> bool:
        """As `by_curve`, at the door."""
        return self._find(lambda key: key.curve_public == public) is not None

    def _find(self, fits: Callable[[NamedKey], bool]) -> Visitor | None:
        if time.monotonic() - self._looked_at > LOOK_S:
            self._looked_at = time.monotonic()
            self._look()
        return next((v for v in self._visitors.values() if v.key and v.key.valid and fits(v.key)), None)

    def _look(self) -> None:
        found = {}
        try:
            files = sorted(self._folder.glob("*.json"))
        except OSError as error:  # a network file system's bad moment, or no file may be opened any more
            log.warning("the folder of keys cannot be read: those that are known stay so", error=str(error))
            return
        for file in files:
            try:
                key = NamedKey.model_validate_json(file.read_text())
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                log.warning("a key cannot be read: nobody comes in by it", file=str(file), error=str(error))
                continue
            found[file.stem] = self._visitors.get(file.stem) or Visitor(file.stem)
            found[file.stem].key = key
        self._visitors = found
