"""Publishes versions to the rollouts, in a thread beside training; a rollout that is behind is served at any time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog
import torch

from protocols.mailbox import FencedError, Mailbox
from protocols.messages import Publish, ReceiverReport, Receivers, Stop
from protocols.weights import CollectiveRoute, Manifest, Route, SharedMemoryRoute, make_manifest
from services.section import SetupError
from services.weights import flat, shm
from services.weights.collective import CollectiveError, Group, serve_store
from services.weights.config import WeightsConfig

log = structlog.get_logger()

PUBLISH_DEADLINE_S = 60.0
RETRY_S = 0.1
SEGMENTS = 4
"""Shared-memory segments that exist at once; the oldest is unlinked, readers keep their mapping."""


@dataclass(slots=True)
class Snapshot:
    """One version in a host buffer, as it is published."""

    version: int
    manifest: Manifest
    buffer: torch.Tensor
    segment: shm.Segment | None = None
    offered: dict[str, float] = field(default_factory=dict)
    """Receiver to when it was offered this version."""
    failed: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Receiver that failed to when it is offered it again, and how often it failed."""


class Publisher:
    """Owns the trainer's inbox: receivers' versions and reports come in, offers go out.

    `stage` copies a version out of the model, `publish` offers it; both are called by the training thread. ``stopped``
    is set once the broker wants the trainer to end.
    """

    def __init__(self, config: WeightsConfig, dtype: str, run_key: str, mailbox: Mailbox) -> None:
        self._config, self._dtype, self._run_key, self._mailbox = config, dtype, run_key, mailbox
        self.stopped = threading.Event()
        self.reason = ""
        self.error: BaseException | None = None
        self.publish_s = 0.0
        """Seconds that the last staging took from the training thread."""
        self._receivers: dict[str, tuple[int, str]] = {}
        """Identity to the version and digest that it serves."""
        self._latest: Snapshot | None = None
        self._segments: list[shm.Segment] = []
        self._lock = threading.Lock()
        self._closed = False
        self._epoch = 0
        self._group: Group | None = None
        if config.transport == "nccl" and not torch.cuda.is_available():
            raise SetupError("weights.transport: nccl needs CUDA, and this machine has none; use shm or gloo")
        if config.transport == "shm":
            shm.remove_leftovers(run_key)
        else:
            self._store, self._store_address = serve_store(config.host)
        self._thread = threading.Thread(target=self._run_thread, name="publisher", daemon=True)
        self._thread.start()

    def stage(self, version: int, named: Sequence[tuple[str, torch.Tensor]]) -> Snapshot:
        """Copies ``named`` weights into a buffer of their own and hashes them; the model may change afterwards."""
        started = time.monotonic()
        weights, nbytes = flat.place(named, self._dtype)
        segment = None
        if self._config.transport == "shm":
            segment = shm.Segment(self._run_key, nbytes)
            self._segments.append(segment)
            for old in self._segments[:-SEGMENTS]:
                old.unlink()
            del self._segments[:-SEGMENTS]
            buffer = flat.from_memory(segment.memory)
        else:
            buffer = torch.zeros(nbytes, dtype=torch.uint8)
        flat.write(named, weights, buffer)
        manifest = make_manifest(weights, flat.as_memory(buffer), int(self._config.bucket_mb * (1 << 20)))
        self.publish_s = time.monotonic() - started
        return Snapshot(version, manifest, buffer, segment)

    def publish(self, snapshot: Snapshot) -> None:
        """Offers ``snapshot`` to every rollout that serves anything else, now and whenever one comes later."""
        with self._lock:
            self._latest = snapshot
        self._mailbox.post(None)

    def close(self) -> None:
        """Ends the thread and removes the segments."""
        self._closed = True
        self._mailbox.post(None)
        self._thread.join(self._config.deadline_s)
        for segment in self._segments:
            segment.unlink()

    def _run_thread(self) -> None:
        try:
            self._run()
        except Exception as error:  # the trainer must hear of it: without this thread nothing reaches it any more
            log.exception("the publisher failed")
            self.error, self.reason = error, str(error)
            self.stopped.set()

    def _run(self) -> None:
        while not self._closed:
            try:
                event = self._mailbox.inbox.get(timeout=1.0)
            except queue.Empty:
                event = None
            if isinstance(event, Stop):
                self.reason = event.reason
                self.stopped.set()
            elif isinstance(event, FencedError):
                self.error, self.reason = event, str(event)
                self.stopped.set()
            elif isinstance(event, Receivers):
                self._receivers = dict(event.serves)
            elif isinstance(event, ReceiverReport):
                self._report(event)
            self._serve()

    def _report(self, report: ReceiverReport) -> None:
        if report.error is None:
            self._receivers[report.receiver] = report.version, report.digest
            return
        log.warning("receiver failed", receiver=report.receiver, version=report.version, error=report.error)
        self._group = None
        if self._latest and self._latest.version == report.version:
            self._again(self._latest, report.receiver)

    def _again(self, snapshot: Snapshot, receiver: str) -> None:
        """Offers it again after a while, longer each time."""
        count = snapshot.failed.get(receiver, (0.0, 0))[1] + 1
        snapshot.failed[receiver] = (time.monotonic() + min(RETRY_S * 2**count, self._config.deadline_s), count)

    def _serve(self) -> None:
        """Offers the newest version to the receivers that are behind it and have no offer of it in hand."""
        with self._lock:
            latest = self._latest
        if latest is None or self.stopped.is_set():
            return
        now, wanted = time.monotonic(), (latest.version, latest.manifest.digest)
        for receiver, since in list(latest.offered.items()):
            if now - since > self._config.deadline_s and self._receivers.get(receiver, wanted) != wanted:
                log.error("receiver is late", receiver=receiver, version=latest.version, waited_s=round(now - since))
                del latest.offered[receiver]
        for receiver, (at, _) in latest.failed.items():
            if now >= at:
                latest.offered.pop(receiver, None)
        behind = [r for r, served in self._receivers.items() if served != wanted and r not in latest.offered]
        if not behind:
            return
        for receiver in behind:
            latest.offered[receiver] = now
            if receiver in latest.failed:
                latest.failed[receiver] = (float("inf"), latest.failed[receiver][1])
        if latest.segment:
            self._offer(latest, SharedMemoryRoute(segment=latest.segment.name), behind)
        else:
            self._broadcast(latest, behind)

    def _offer(self, snapshot: Snapshot, route: Route, targets: list[str]) -> None:
        self._mailbox.ask_later(
            Publish(version=snapshot.version, manifest=snapshot.manifest, route=route, targets=targets),
            PUBLISH_DEADLINE_S,
        )

    def _broadcast(self, snapshot: Snapshot, targets: list[str]) -> None:
        ranks = {receiver: rank for rank, receiver in enumerate(sorted(targets), 1)}
        if self._group and self._group.route.ranks == ranks:
            route = self._group.route
        else:
            self._epoch += 1
            self._group = None
            route = CollectiveRoute(
                backend="nccl" if self._config.transport == "nccl" else "gloo",
                store=self._store_address,
                epoch=self._epoch,
                ranks=ranks,
                timeout_s=self._config.deadline_s,
            )
        self._offer(snapshot, route, targets)
        try:
            if self._group is None:
                self._group = Group(route, 0, self._config.host, self._store)
            buffer = snapshot.buffer.cuda() if route.backend == "nccl" else snapshot.buffer
            self._group.broadcast(snapshot.manifest, buffer)
        except CollectiveError as error:
            log.error("broadcast failed", version=snapshot.version, receivers=targets, error=str(error))
            self._group = None
            for receiver in targets:  # in a new epoch, with whoever is there then
                self._again(snapshot, receiver)
