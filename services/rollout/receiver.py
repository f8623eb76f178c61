"""Receives versions into a shadow and verifies them, in a thread beside decoding."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
import torch

from protocols.mailbox import Mailbox
from protocols.messages import LoadFailed, Offer
from protocols.weights import CollectiveRoute, DigestError, SharedMemoryRoute, verify
from services.rollout.engines.base import Engine
from services.weights import flat, shm
from services.weights.collective import CollectiveError, Group

log = structlog.get_logger()


@dataclass(frozen=True)
class Prepared:
    """A verified version, ready to be swapped in between two decoding steps. Posted to the actor's inbox."""

    version: int
    digest: str
    weights: Any
    receive_s: float
    verify_s: float
    swapped: threading.Event
    """Set once it serves: until then nothing else is prepared, since an engine may have just one shadow."""


class Receiver:
    """Takes offers in order. Where several wait, those through shared memory give way to the newest; broadcasts are
    joined in turn, since the sender counts on every receiver."""

    def __init__(self, engine: Engine, mailbox: Mailbox, identity: str, host: str) -> None:
        self._engine, self._mailbox = engine, mailbox
        self._identity, self._host = identity, host
        self._offers: queue.SimpleQueue[Offer | None] = queue.SimpleQueue()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._group: Group | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="receiver", daemon=True)
        self._thread.start()

    def offer(self, offer: Offer) -> None:
        """Queues an offer."""
        self._offers.put(offer)

    def close(self) -> None:
        """Ends the thread after the offer in hand."""
        self._closing = True
        self._offers.put(None)

    def _run(self) -> None:
        while True:
            offer = self._offers.get()
            while offer and offer.route.type == "shm" and not self._offers.empty():
                offer = self._offers.get()
            if offer is None:
                return
            try:
                prepared = self._load(offer)
                self._mailbox.post(prepared)
                while not prepared.swapped.wait(1.0) and not self._closing:
                    pass
            except Exception as error:  # whatever went wrong, the version is not served and the sender hears why
                log.warning("version not loaded", version=offer.version, error=str(error))
                self._group = None
                self._mailbox.tell(LoadFailed(version=offer.version, error=f"{type(error).__name__}: {error}"))

    def _load(self, offer: Offer) -> Prepared:
        started = time.monotonic()
        manifest = offer.manifest
        if self._buffer.numel() != manifest.nbytes:
            self._buffer = torch.empty(manifest.nbytes, dtype=torch.uint8)
        host_buffer = self._buffer
        if isinstance(offer.route, SharedMemoryRoute):
            segment = shm.attach(offer.route.segment, manifest.nbytes)
            np.copyto(host_buffer.numpy(), np.frombuffer(segment, np.uint8))
        else:
            host_buffer = self._broadcast(offer, offer.route)
        received = time.monotonic()
        verify(manifest, flat.as_memory(host_buffer))
        verified = time.monotonic()
        weights = self._engine.prepare(flat.views(manifest, host_buffer))
        times = received - started, verified - received
        return Prepared(offer.version, manifest.digest, weights, *times, swapped=threading.Event())

    def _broadcast(self, offer: Offer, route: CollectiveRoute) -> torch.Tensor:
        if self._identity not in route.ranks:
            raise DigestError(f"{self._identity} has no rank in epoch {route.epoch}")
        if self._group is None or self._group.route.epoch != route.epoch:
            self._group = Group(route, route.ranks[self._identity], self._host)
        try:
            if route.backend == "nccl":
                staged = torch.empty(offer.manifest.nbytes, dtype=torch.uint8, device="cuda")
                self._group.broadcast(offer.manifest, staged)
                return staged.cpu()
            self._group.broadcast(offer.manifest, self._buffer)
        except CollectiveError:
            self._group = None
            raise
        return self._buffer
