"""CURVE keys of a run: one pair for the broker, one for everybody who may speak to it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from dataclasses import fields as fields_of
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import structlog
import zmq

log = structlog.get_logger()


class KeysError(ValueError):
    """A key file that cannot be used; says which and what to do."""


@dataclass(frozen=True)
class ClientKeys:
    """What an actor needs: the broker's public key, and the run's client pair (Z85 text)."""

    broker_public: str
    client_public: str
    client_secret: str

    def to_serve(self) -> BrokerKeys:
        """For a port of an actor's own, which everybody of the run may speak to: they all hold the client pair."""
        return BrokerKeys(self.client_public, self.client_secret, self.client_public)

    def to_reach(self) -> ClientKeys:
        """For who connects to such a port."""
        return ClientKeys(self.client_public, self.client_public, self.client_secret)


@dataclass(frozen=True)
class BrokerKeys:
    """What the broker needs: its own pair, and the public key that it lets in."""

    broker_public: str
    broker_secret: str
    client_public: str


def make(folder: Path) -> None:
    """Makes both key files below ``folder``, once, readable by their owner alone."""
    if (folder / "client.json").is_file():
        return
    broker, broker_secret = (key.decode() for key in zmq.curve_keypair())
    client, client_secret = (key.decode() for key in zmq.curve_keypair())
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Whole, or not there; the client's last, by which it is known that both are.
    for name, keys in (
        ("broker.json", BrokerKeys(broker, broker_secret, client)),
        ("client.json", ClientKeys(broker, client, client_secret)),
    ):
        aside = folder / f".{name}-{os.getpid()}"
        aside.unlink(missing_ok=True)
        _write(aside, asdict(keys))
        aside.rename(folder / name)


def make_guest(folder: Path) -> ClientKeys:
    """A pair of its own for who may come in at a gateway of the run whose keys lie in ``folder``, and nowhere else.
    Raises `KeysError`."""
    public, secret = (key.decode() for key in zmq.curve_keypair())
    return ClientKeys(load_client(folder / "client.json").client_public, public, secret)


def save_client(path: Path, keys: ClientKeys) -> None:
    """A file for `load_client`, readable by its owner alone. Raises `OSError` where there is one."""
    _write(path, asdict(keys))


def load_client(path: Path) -> ClientKeys:
    """The keys in a client file. Raises `KeysError`."""
    return ClientKeys(**_read(path, ClientKeys))


def load_broker(path: Path) -> BrokerKeys:
    """The keys in a broker file. Raises `KeysError`."""
    return BrokerKeys(**_read(path, BrokerKeys))


def is_loopback(address: str) -> bool:
    """Nobody beyond this machine can reach ``address``."""
    parts = urlsplit(address)
    if parts.scheme != "tcp":
        return parts.scheme in ("ipc", "inproc")
    try:
        return ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return parts.hostname == "localhost"


def _write(path: Path, fields: dict[str, str]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(json.dumps(fields))


def _read(path: Path, kind: type) -> dict[str, str]:
    try:
        fields = json.loads(path.read_text())
    except OSError as error:
        raise KeysError(f"--keys: cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise KeysError(f"--keys: {path} is not a key file") from None
    expected = {field.name for field in fields_of(kind)}
    if not isinstance(fields, dict) or fields.keys() != expected or not all(map(_is_key, fields.values())):
        raise KeysError(f"--keys: {path} does not hold {', '.join(sorted(expected))}")
    return fields


def _is_key(value: object) -> bool:
    return isinstance(value, str) and len(value) == 40


class Door:
    """Lets in whoever proves to have the run's client key, and guests whose public keys ``admits``."""

    def __init__(self, client_public: str, admits: Callable[[str], bool]) -> None:
        self._allowed, self._admits = client_public, admits

    def callback(self, _domain: str, key: bytes) -> bool:
        """As pyzmq's authenticator asks, whose thread ends of an exception, and with it the door of all."""
        try:
            return key.decode() == self._allowed or self._admits(key.decode())
        except Exception:
            log.exception("who asks at the door is not let in: nobody could say who it is")
            return False
