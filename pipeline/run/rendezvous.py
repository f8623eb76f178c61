"""How ranks of a learner find each other. torch's own way listens on every interface, and unpickles what anybody has
written there: on one machine nothing is unpickled, and nobody else is heard; where several meet, what a stranger to the
run's folder has written is not looked at."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler

from penstock.services.weights.transports.broadcast_group import serve_store

NAME = "penstock"
_SIGNED = hashlib.sha256().digest_size
_Found = tuple[bytes, Any] | None


class Alone(RendezvousHandler):
    """All ranks are on this machine, and meet at an address that no other one reaches."""

    def __init__(self) -> None:
        self._store, endpoint = serve_store("127.0.0.1")
        self._address = RendezvousStoreInfo("127.0.0.1", int(endpoint.rpartition(":")[2]))

    @property
    def use_agent_store(self) -> bool:
        """Ranks take the store that is there."""
        return True

    def get_backend(self) -> str:
        """See base class."""
        return NAME

    def next_rendezvous(self) -> RendezvousInfo:
        """Nobody else is waited for."""
        return RendezvousInfo(self._store, 0, 1, self._address)

    def is_closed(self) -> bool:
        """See base class."""
        return False

    def set_closed(self) -> None:
        """See base class."""

    def num_nodes_waiting(self) -> int:
        """See base class."""
        return 0

    def get_run_id(self) -> str:
        """See base class."""
        return NAME

    def shutdown(self) -> bool:
        """See base class."""
        return True


class Sealed(RendezvousBackend):
    """What several machines say to each other by a ``store``, signed with a ``secret`` that all of them have."""

    def __init__(self, store: TCPStore, secret: bytes) -> None:
        self._plain, self._secret = C10dRendezvousBackend(store, NAME), secret

    @property
    def name(self) -> str:
        """See base class."""
        return NAME

    def get_state(self) -> _Found:
        """See base class."""
        return self._opened(self._plain.get_state())

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """See base class."""
        found = self._plain.set_state(self._signature(state) + state, token)
        opened = self._opened(found[:2] if found else None)
        return (*opened, found[2]) if found and opened else None

    def _signature(self, state: bytes) -> bytes:
        return hmac.digest(self._secret, state, "sha256")

    def _opened(self, found: _Found) -> _Found:
        if found is None:
            return None
        signature, state = found[0][:_SIGNED], found[0][_SIGNED:]
        if not hmac.compare_digest(signature, self._signature(state)):
            raise RendezvousStateError("where machines meet a stranger to the run's folder has written")
        return state, found[1]


@dataclass(frozen=True)
class Met:
    """Where several machines have met."""

    store: TCPStore
    secret: bytes = field(repr=False)
    """torch logs what it is configured with."""


def together(store: TCPStore, secret: bytes, parameters: RendezvousParameters) -> RendezvousHandler:
    """As many machines as ``parameters`` say meet at the ``store``, which one of them serves."""
    return create_handler(store, Sealed(store, secret), parameters)


def _make(parameters: RendezvousParameters) -> RendezvousHandler:
    met = parameters.config.get("met")
    return together(met.store, met.secret, parameters) if met else Alone()


rendezvous_handler_registry.register(NAME, _make)
