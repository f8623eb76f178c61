"""The rollout's side of an engine whose weights lie in processes of its own: those receive, and it speaks for them.

    trainer            rollout: WorkerDesk                    worker: WorkerReceiver, one for each
      │ Invite ────────────▶ passes on ────────────────────────▶ looks where it is
      │ ◀──────────── Reach(all places) ◀──────────────────────  Reach(its place)
      │ Propose ───────────▶ passes on, with rank and share ───▶ opens the staging buffer
      │ ══════════════════════ buckets ════════════════════════▶ keeps, and hashes, those of its share
      │ CommitVersion ─────▶ passes on ────────────────────────▶ compares; asks the trainer for what is wrong
      │                      waits for all ◀──────────────────── Loaded: proved, ready to be loaded
      │                      pause; load in all; canary; resume
      │ ◀──────────── Loaded | LoadFailed, once

Workers of this machine stage a version together: once in its memory, however many they are. The memory is this
process's, but no byte of a version passes it. Workers are connected by a port of it, under the run's keys.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import structlog

from penstock.protocols import messages as m
from penstock.protocols.keys import ClientKeys
from penstock.protocols.mailbox import Mailbox
from penstock.protocols.router_server import RouterServer
from penstock.protocols.versions import CollectiveRoute, CudaIpcRoute, Share, SharedMemoryRoute
from penstock.services.weights.buffers import HostBuffer, neighbourhood
from penstock.services.weights.config import WeightsConfig
from penstock.services.weights.receiver.receiver import Prepared

log = structlog.get_logger()

OWN = "rollout"
"""What this process calls itself at its own desk."""


@dataclass(frozen=True)
class ReceivedVersion:
    """What `Prepared.weights` is: every worker holds this version, proved."""

    epoch: int
    version: int


@dataclass
class _Coming:
    """A version that the workers were told of."""

    epoch: int
    version: int
    workers: frozenset[str]
    """Who were told: each proves its share of it."""
    into: int
    """Which of the common buffers it comes into."""
    commit: m.CommitVersion | None = None
    ready: dict[str, m.Loaded] = field(default_factory=dict)
    """By worker."""
    over: bool = False
    """It was handed on, or has failed."""


class WorkerDesk:
    """In the place of a `receiver.Receiver`, for ``count`` workers; hears the trainer by ``mailbox``."""

    def __init__(self, count: int, mailbox: Mailbox, config: WeightsConfig, keys: ClientKeys | None = None) -> None:
        self._count, self._mailbox, self._config = count, mailbox, config
        own = keys.to_serve() if keys else None
        self._router = RouterServer(f"tcp://{config.host}:0", own, key="weights.host")
        self.address = self._router.address
        """Where workers connect to."""
        self._workers: dict[str, str] = {}
        """Each one's neighbourhood, in the order that they came: a worker's place is its rank among them."""
        self._neighbourhood = neighbourhood()
        self._common: list[HostBuffer] = []
        """Two that the workers of this machine fill in turn."""
        self._held = 1
        """Which of them has the version that was handed on last: the engine may be loading it."""
        self._invite: m.Invite | None = None
        self._reached: dict[str, m.Reach] = {}
        self._coming: _Coming | None = None
        self._closing = threading.Event()
        mine = keys.to_reach() if keys else None
        self._line = Mailbox(self.address, OWN, mine)
        for heard in (m.Invite, m.Propose, m.CommitVersion):
            mailbox.handlers[heard] = self._line.tell
        self._thread = threading.Thread(target=self._run, name="worker-desk", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._closing.set()
        self._thread.join(2)
        self._line.close(0.5)

    def _run(self) -> None:
        while not self._closing.is_set():
            for identity, request, message in self._router.receive(0.2):
                try:
                    self._handle(identity, message)
                except Exception:  # the versions after this one need the thread
                    log.exception("a message at the workers' desk was of no use", type=type(message).__name__)
                if request:
                    self._router.send(identity, m.Ack(), request)
            self._router.flush()
        self._router.close()

    def _handle(self, identity: str, message: m.Message) -> None:
        if isinstance(message, m.Hello):
            self._welcome(identity, message.host)
        elif isinstance(message, m.Invite):
            self._invite, self._reached = message, {}
            for worker in self._workers:
                self._router.send(worker, message)
        elif isinstance(message, m.Reach):
            self._reached[identity] = message
            self._answer_invitation(message)
        elif isinstance(message, m.Propose):
            if self._coming and (message.epoch, message.version) <= (self._coming.epoch, self._coming.version):
                return  # said again: the broker was away
            self._give_up_coming()
            self._coming = _Coming(message.epoch, message.version, frozenset(self._workers), 1 - self._held)
            for place, worker in enumerate(self._workers):
                self._router.send(worker, self._addressed(message, worker, place))
        elif isinstance(message, m.CommitVersion):
            if self._coming and (message.epoch, message.version) == (self._coming.epoch, self._coming.version):
                self._coming.commit = message
                for worker in self._workers:
                    self._router.send(worker, message)
        elif isinstance(message, m.Loaded):
            self._ready(identity, message)
        elif isinstance(message, m.LoadFailed):
            self._failed(identity, message)

    def _welcome(self, identity: str, neighbourhood: str) -> None:
        if identity not in self._workers:
            self._workers[identity] = neighbourhood
            if self._invite:
                self._router.send(identity, self._invite)

    def _answer_invitation(self, last: m.Reach) -> None:
        """Once all workers have said where they are."""
        if len(self._reached) < self._count or any(r.layout != last.layout for r in self._reached.values()):
            return
        places = [place for worker in self._workers for place in self._reached[worker].places]
        newest = max(self._coming.epoch if self._coming else -1, *(reach.newest for reach in self._reached.values()))
        answer = last.model_copy(update={"places": places, "newest": newest})
        self._mailbox.ask_later(answer, self._config.deadline_s)

    def _addressed(self, message: m.Propose, worker: str, place: int) -> m.Propose:
        """As if it had been said to ``worker`` alone."""
        route = message.route
        if isinstance(route, SharedMemoryRoute | CudaIpcRoute):
            return message
        told: dict[str, object] = {"share": self._share(worker)}
        if isinstance(route, CollectiveRoute):
            first = route.ranks[self._mailbox.identity]
            told["route"] = route.model_copy(update={"ranks": {worker: first + place}})
        return message.model_copy(update=told)

    def _share(self, worker: str) -> Share | None:
        """What of the coming version ``worker`` receives, where others of this machine receive the rest."""
        beside = [one for one, where in self._workers.items() if where and where == self._neighbourhood]
        if self._invite is None or self._coming is None or worker not in beside or len(beside) < 2:
            return None
        nbytes = self._invite.layout.nbytes
        if not self._common or self._common[0].tensor.numel() != nbytes:
            self._common = [HostBuffer(nbytes, shared=True) for _ in range(2)]
        first, second = (buffer.path for buffer in self._common)
        place, count = beside.index(worker), len(beside)
        return Share(place=place, count=count, buffers=(first, second), into=self._coming.into)

    def _give_up_coming(self) -> None:
        """The trainer waits for it no more: workers that are ready must not wait for those that are not."""
        coming = self._coming
        if coming and not coming.over:
            late = ", ".join(w.rpartition("#")[0] for w in self._workers if w not in coming.ready)
            log.warning("a version is given up: another is offered", version=coming.version, late=late or "none")
            forget = m.LoadFailed(epoch=coming.epoch, version=coming.version, error="another is offered")
            for worker in self._workers:
                self._router.send(worker, forget)

    def _ready(self, identity: str, message: m.Loaded) -> None:
        coming = self._coming
        if coming is None or (message.epoch, message.version) != (coming.epoch, coming.version) or coming.over:
            return
        if identity not in coming.workers:
            return
        coming.ready[identity] = message
        if coming.ready.keys() == coming.workers and coming.commit:
            coming.over, self._held = True, coming.into
            ready = list(coming.ready.values())
            loaded = message.model_copy(
                update={
                    "bytes_received": sum(one.bytes_received for one in ready),
                    "buckets_again": sum(one.buckets_again for one in ready),
                    **{name: max(getattr(one, name) for one in ready) for name in ("receive_s", "verify_s")},
                }
            )
            version = ReceivedVersion(coming.epoch, coming.version)
            self._mailbox.post(Prepared(version, loaded, threading.Event(), coming.commit.canary))

    def _failed(self, identity: str, message: m.LoadFailed) -> None:
        """One worker's failure is that of all: nobody keeps what he has of the version."""
        coming = self._coming
        if coming is None or (message.epoch, message.version) != (coming.epoch, coming.version) or coming.over:
            return
        coming.over = True
        for worker in self._workers:
            if worker != identity:
                self._router.send(worker, message)
        said = message.model_copy(update={"error": f"worker {identity.partition('#')[0]}: {message.error}"})
        self._mailbox.ask_later(said, self._config.deadline_s)
