"""A publish's process groups: the receivers that gloo or NCCL reaches, met and sent to together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import structlog
import torch

from penstock.protocols.cut import Cut
from penstock.protocols.versions import CollectiveRoute, Route
from penstock.protocols.weight_channel import Epoch
from penstock.services.weights.config import WeightsConfig
from penstock.services.weights.sender.snapshot import Snapshot
from penstock.services.weights.transports.broadcast_group import BroadcastGroup, CollectiveError, serve_store

log = structlog.get_logger()

Backend = Literal["gloo", "nccl"]
REGISTERED_S = 0.5e9
"""Bytes of a version for which a receiver registers host memory with CUDA in a second, two versions of it, at least."""
BACKENDS: tuple[Backend, ...] = ("gloo", "nccl")


class Broadcast:
    """At most one group a backend; kept from publish to publish while the epoch is the same. ``broken``: one of them
    broke in this publish, and its receivers ask for what they miss."""

    def __init__(self, config: WeightsConfig, device: torch.device) -> None:
        self.broken = False
        self._began: float | None = None
        self._config, self._device = config, device
        self._store: Any = None
        self._store_address = ""
        self._groups: dict[Backend, BroadcastGroup] = {}

    def routes(
        self, epoch: Epoch, base: str, workers: Callable[[str], int], cut: Cut, nbytes: int
    ) -> dict[Backend, CollectiveRoute]:
        """How the epoch's members are reached that a group reaches. ``base``: digest of the version that changes are
        sent of; ``workers``: how many processes of a member hold its weights; ``cut``: how the trainer's ranks are;
        ``nbytes`` has a version."""
        found: dict[Backend, CollectiveRoute] = {}
        for backend in BACKENDS:
            ranks, size = {}, cut.ranks
            for identity in epoch.by(backend):
                ranks[identity], size = size, size + workers(identity)
            if ranks:
                found[backend] = CollectiveRoute(
                    type=backend,
                    store=self._serve_store(),
                    ranks=ranks,
                    size=size,
                    cut=cut,
                    stall_s=self._config.stall_s,
                    meet_s=self._config.meet_s + nbytes / REGISTERED_S,
                    sparse_from=base if backend == "gloo" else "",
                )
        return found

    def meet(
        self,
        epoch: Epoch,
        routes: dict[Backend, CollectiveRoute],
        version: int,
        propose: Callable[[list[str], Route], None],
    ) -> list[BroadcastGroup]:
        """Proposes ``version`` to the members of ``routes`` and meets them; a group of the same epoch is used again."""
        self.broken, self._began = False, None
        before, self._groups = self._groups, {}
        for backend in before.keys() - routes.keys():
            before[backend].close()
        for backend, route in routes.items():
            propose(sorted(route.ranks), route)
            group = before.get(backend)
            try:
                if group and group.epoch == epoch.number:
                    group.route = route
                else:
                    if group:
                        group.close()
                    group = BroadcastGroup(route, epoch.number, 0, self._config.host, self._store, self._device)
                self._groups[backend] = group
            except CollectiveError as error:
                self._broke(backend, error, version)
        return list(self._groups.values())

    def drop(self, broke: Mapping[str, str], version: int) -> None:
        """Some rank of the trainer says that these backends' groups broke in this publish, and why."""
        for backend in list(self._groups):
            if backend in broke:
                self._broke(backend, broke[backend], version)

    def send(self, index: int, snapshot: Snapshot) -> None:
        """Starts to send bucket ``index``, or its changes."""
        start, end = snapshot.layout.spans[index]
        self._began = self._began or time.monotonic()
        for backend, group in list(self._groups.items()):
            try:
                changes = snapshot.changes.get(index) if group.route.sparse_from else None
                group.send(index, snapshot.buffer.tensor[start:end], changes)
            except CollectiveError as error:
                self._broke(backend, error, snapshot.version)

    def finish(self, snapshot: Snapshot) -> None:
        """Waits until everything is sent, or a group is broken."""
        for backend, group in list(self._groups.items()):
            try:
                group.finish()
            except CollectiveError as error:
                self._broke(backend, error, snapshot.version)
            if self._began:  # by `send`; several ranks measure it themselves
                snapshot.cost.transfer_s = time.monotonic() - self._began
            snapshot.cost.bytes_sent, group.bytes_sent = max(snapshot.cost.bytes_sent, group.bytes_sent), 0

    def close(self) -> None:
        """Lets go of the connections."""
        for group in self._groups.values():
            group.close()
        self._groups.clear()
        self._store = None

    def rank_of(self, identity: str) -> int | None:
        """The rank of a receiver; None where it is in no group."""
        ranks = [group.route.ranks.get(identity) for group in self._groups.values()]
        return next((rank for rank in ranks if rank), None)

    def _broke(self, backend: Backend, error: object, version: int) -> None:
        log.error("the epoch broke; receivers ask for the rest", version=version, error=str(error))
        if group := self._groups.pop(backend, None):
            group.abort()
        self.broken = True

    def _serve_store(self) -> str:
        if self._store is None:
            self._store, self._store_address = serve_store(self._config.host)
        return self._store_address
