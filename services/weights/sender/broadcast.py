"""A publish's process groups: the receivers that gloo or NCCL reaches, met and sent to together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import structlog
import torch

from penstock.protocols.versions import CollectiveRoute, Route
from penstock.protocols.weight_channel import Epoch
from penstock.services.weights.config import WeightsConfig
from penstock.services.weights.sender.snapshot import Snapshot
from penstock.services.weights.transports.broadcast_group import BroadcastGroup, CollectiveError, serve_store

log = structlog.get_logger()

Backend = Literal["gloo", "nccl"]
BACKENDS: tuple[Backend, ...] = ("gloo", "nccl")


class Broadcast:
    """At most one group a backend; kept from publish to publish while the epoch is the same. ``broken``: one of them
    broke in this publish, and its receivers ask for what they miss."""

    def __init__(self, config: WeightsConfig) -> None:
        self.broken = False
        self._config = config
        self._store: Any = None
        self._store_address = ""
        self._groups: dict[Backend, BroadcastGroup] = {}

    def meet(
        self,
        epoch: Epoch,
        snapshot: Snapshot,
        workers: Callable[[str], int],
        propose: Callable[[list[str], Route], None],
    ) -> None:
        """Proposes ``snapshot`` to the epoch's members and meets them; a group of the same epoch is used again.
        ``workers`` says how many processes of a member hold its weights."""
        self.broken = False
        before, self._groups = self._groups, {}
        for backend in BACKENDS:
            members = epoch.by(backend)
            if not members:
                continue
            ranks, size = {}, 1
            for identity in members:
                ranks[identity], size = size, size + workers(identity)
            route = CollectiveRoute(
                type=backend,
                store=self._serve_store(),
                ranks=ranks,
                size=size,
                stall_s=self._config.stall_s,
                sparse_from=snapshot.base if backend == "gloo" else "",
            )
            propose(members, route)
            group = before.get(backend)
            try:
                if group and group.epoch == epoch.number:
                    group.route = route
                else:
                    group = BroadcastGroup(route, epoch.number, 0, self._config.host, self._store)
                self._groups[backend] = group
            except CollectiveError as error:
                self._broke(backend, error, snapshot)

    def send(self, index: int, snapshot: Snapshot, on_device: torch.Tensor) -> None:
        """Starts to send bucket ``index``, or its changes; NCCL sends it from the model's device."""
        start, end = snapshot.layout.spans[index]
        for backend, group in list(self._groups.items()):
            try:
                if backend == "nccl":
                    group.send(index, on_device)
                    group.finish(but=1)  # its memory is written again after the next one
                else:
                    changes = snapshot.changes.get(index) if group.route.sparse_from else None
                    group.send(index, snapshot.buffer.tensor[start:end], changes)
            except CollectiveError as error:
                self._broke(backend, error, snapshot)

    def finish(self, snapshot: Snapshot) -> None:
        """Waits until everything is sent, or a group is broken."""
        started = time.monotonic()
        for backend, group in list(self._groups.items()):
            try:
                group.finish()
            except CollectiveError as error:
                self._broke(backend, error, snapshot)
            snapshot.cost.transfer_s = time.monotonic() - started
            snapshot.cost.bytes_sent, group.bytes_sent = max(snapshot.cost.bytes_sent, group.bytes_sent), 0

    def close(self) -> None:
        """Lets go of the connections."""
        self._groups.clear()
        self._store = None

    def rank_of(self, identity: str) -> int | None:
        """The rank of a receiver; None where it is in no group."""
        ranks = [group.route.ranks.get(identity) for group in self._groups.values()]
        return next((rank for rank in ranks if rank), None)

    def _broke(self, backend: Backend, error: CollectiveError, snapshot: Snapshot) -> None:
        log.error("the epoch broke; receivers ask for the rest", version=snapshot.version, error=str(error))
        self._groups.pop(backend, None)
        self.broken = True

    def _serve_store(self) -> str:
        if self._store is None:
            self._store, self._store_address = serve_store(self._config.host)
        return self._store_address
