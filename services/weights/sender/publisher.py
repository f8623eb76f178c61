"""Publishes versions to the rollouts, in a thread beside training.

    training thread   │ forward, backward of step s+1 ……………………………│ optimizer step │ …
    publisher thread  │ gather+cast+hash bucket k+1 ┐ Commit: step s and │ seeds, answers …
                      │ broadcast bucket k …………………┘ version s+1       │

The parameters are read while the next step computes its gradient, and must be read before its optimizer step changes
them: `Publication.read` says when. The protocol is `protocols.weight_channel`'s; this file moves its bytes and
messages.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import structlog

from penstock.protocols import messages as m
from penstock.protocols.experience import as_bytes
from penstock.protocols.keys import ClientKeys
from penstock.protocols.mailbox import Mailbox
from penstock.protocols.versions import (
    CollectiveRoute,
    Digests,
    Route,
    SharedMemoryRoute,
    SnapshotRoute,
    Transport,
)
from penstock.protocols.weight_channel import Epoch, Peer, PublishState
from penstock.services.runtime import failpoint
from penstock.services.runtime.errors import SetupError
from penstock.services.weights.buffers import BufferPool
from penstock.services.weights.config import WeightsConfig
from penstock.services.weights.queues import current_queue, use_device
from penstock.services.weights.sender import changes
from penstock.services.weights.sender.broadcast import Backend, Broadcast
from penstock.services.weights.sender.device_stage import DeviceStage
from penstock.services.weights.sender.gpu_copies import GpuCopies
from penstock.services.weights.sender.publication import Publication
from penstock.services.weights.sender.rank_sender import RankSender
from penstock.services.weights.sender.shard_exporter import ShardExporter
from penstock.services.weights.sender.snapshot import Snapshot, answer
from penstock.services.weights.sender.ways import Ways
from penstock.services.weights.transports import cuda_ipc, shared_memory
from penstock.services.weights.transports.broadcast_group import BroadcastGroup
from penstock.services.weights.transports.bucket_server import BucketServer

log = structlog.get_logger()

SAY_DEADLINE_S = 60.0
POLL_S = 0.2


class Publisher:
    """Rollouts come, go and answer in the mailbox's thread, and are heard in this one's; `publish` hands it a version.

    ``error`` is set once the thread has failed: without it nothing reaches the rollouts any more. ``verify=False``
    leaves out all digests, to measure what they cost. ``clock``: seconds by which rollouts are late; it is given where
    they share the trainer's devices, and stands still while they sleep.
    """

    def __init__(
        self,
        config: WeightsConfig,
        source: ShardExporter,
        run_key: str,
        mailbox: Mailbox,
        keys: ClientKeys | None = None,
        verify: bool = True,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._clock = clock or time.monotonic
        self._config, self._source, self._mailbox, self._verify = config, source, mailbox, verify
        self.error: BaseException | None = None
        self.loaded: Callable[[m.Loaded], None] = lambda loaded: None
        """Told of every version that a rollout serves, from the publisher's thread."""
        self._events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._publications: list[Publication] = []
        """Not committed yet."""
        self.latest: Snapshot | None = None
        self._coming: Snapshot | None = None
        """What rollouts hear of now: they ask for it before this process knows that they have."""
        self._pinned: Snapshot | None = None
        """One before the latest, as long as somebody loads it: a seed may take longer than a step."""
        self._gpu = cuda_ipc.gpu_of(source.device)
        if config.transport in ("nccl", "cuda_ipc") and not self._gpu:
            raise SetupError(
                f"weights.transport: {config.transport} needs the trainer on a GPU, and it is on a CPU; use auto"
            )
        self._probe: shared_memory.Probe | None = None
        shared = config.transport in ("auto", "shm")
        if shared:
            shared_memory.remove_leftovers(run_key)
            self._probe = shared_memory.Probe(run_key)
        in_parts = source.cut.ranks > 1 or self._gpu
        self.ranks = RankSender(source, config.host, shared=clock is not None) if in_parts else None
        """This rank's part of a version that several ranks, or one on a GPU, publish."""
        stage = self.ranks.stage if self.ranks else None
        self._gpu_copies = stage and GpuCopies(source.layout.nbytes, source.device, stage.queue)
        nonce = self._probe.nonce if self._probe else None
        gpus = self.ranks.gpus if self.ranks else [self._gpu]
        self._ways = Ways(config.transport, nonce, gpus, clock is not None)
        self._buffers = BufferPool(bool(self.ranks), run_key if shared else None)
        # Epochs of a trainer that was started again come after those of the one before.
        self._sender = PublishState(time.time_ns() // 1_000_000, partial(config.patience_s, source.loaded_bytes))
        self._snapshots = BucketServer(config.host, config.snapshot_port, keys, self._answer_fetch)
        self._broadcast = Broadcast(config, source.device)
        self._lock = threading.Lock()
        self._closed = False
        for heard in (m.Receivers, m.Reach, m.Loaded, m.LoadFailed):
            mailbox.handlers[heard] = self._events.put
        self._thread = threading.Thread(target=self._run_thread, name="publisher", daemon=True)
        self._thread.start()

    @property
    def peers(self) -> dict[str, Peer]:
        """The rollouts, and how each stands."""
        return self._sender.peers

    @property
    def loading(self) -> bool:
        """A rollout has been told of a version, and does not serve it yet."""
        return any(peer.loading for peer in list(self._sender.peers.values()))

    def publish(self, publication: Publication) -> Publication:
        """Begins to publish a version; its futures say how far it is, and what went wrong. Called by the thread that
        trains: the version is what the model is once all that this has put into the device's queue is done."""
        publication.trained = current_queue(self._source.device).mark()
        self._publications = [p for p in self._publications if not p.committed.done()] + [publication]
        self._events.put(publication)
        if self.error:
            publication.fail(self.error)
        return publication

    def close(self) -> None:
        """Ends the thread, and lets go of connections, buffers and segments."""
        self._closed = True
        self._events.put(None)
        self._thread.join(max(self._config.stall_s, self._config.meet_s) + 5)
        self._snapshots.close()
        self.latest = self._pinned = None
        self._broadcast.close()
        self._buffers.close()
        if self._probe:
            self._probe.unlink()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run_thread(self) -> None:
        use_device(self._source.device)
        try:
            while not self._closed:
                try:
                    self._handle(self._events.get(timeout=POLL_S))
                except queue.Empty:
                    pass
                while not self._events.empty():  # who has answered is not late
                    self._handle(self._events.get())
                self._look_after()
        except Exception as error:  # the trainer must hear of it
            log.exception("the publisher failed")
            self.error = error
        finally:
            for publication in self._publications:
                publication.fail(self.error or RuntimeError("the publisher has ended"))

    def _handle(self, event: object) -> None:
        sender, now = self._sender, self._clock()
        if isinstance(event, Publication):
            self._publish(event)
        elif isinstance(event, m.Receivers):
            sender.present(event.serves)
            self._ways.keep(event.serves)
        elif isinstance(event, m.Reach):
            if event.layout != self._source.layout.digest:
                log.info("an answer to an earlier trainer's invitation counts for nothing", receiver=event.receiver)
                return  # it is invited again
            sender.after(event.newest)
            nccl = {who for who, peer in sender.peers.items() if peer.transport == "nccl"}
            transport = self._ways.choose(event, nccl)
            if sender.reached(event.receiver, transport):
                self._ways.places[event.receiver] = event.places
                hosts = sorted({place.host for place in event.places})
                workers = len(event.places)
                log.info("receiver reached", receiver=event.receiver, transport=transport, hosts=hosts, workers=workers)
        elif isinstance(event, m.Loaded):
            if sender.loaded(event.receiver, event.epoch, event.version, event.digest, now) is not None:
                self.loaded(event)
            if event.buckets_again and event.transport in ("gloo", "nccl"):  # its end of the group broke
                sender.broken()
        elif isinstance(event, m.LoadFailed):
            failed = sender.failed(event.receiver, event.epoch, event.version, now)
            log.warning("receiver failed", again=failed, **event.model_dump())

    def _look_after(self) -> None:
        """Invites strangers, seeds who is behind, votes out who is late."""
        now = self._clock()
        for late in self._sender.late(now):
            log.error(
                "receiver is late: voted out",
                receiver=late.identity,
                rank=self._broadcast.rank_of(late.identity),
                epoch=late.epoch,
                version=late.version,
                waited_s=round(late.waited_s, 1),
            )
        invited = self._sender.invitations(now)
        if invited:
            if self._probe:
                self._probe.renew()
            probe = self._probe.name if self._probe else ""
            key = as_bytes(self._source.gmac.key)
            self._say(m.Invite(targets=invited, probe=probe, layout=self._source.layout, key=key))
        if self.latest is None:
            return
        for identity, epoch, transport in self._sender.seeds(now):
            log.info("seeding", receiver=identity, epoch=epoch, version=self.latest.version, transport=transport)
            self._propose([identity], epoch, self.latest, self._route_alone(identity, transport, self.latest))
            self._say(self.latest.commit([identity], epoch))

    def _publish(self, publication: Publication) -> None:
        started = time.monotonic()
        layout = self._source.layout
        if self._pinned and not self._loads(self._pinned):
            self._pinned = None
        kept = [snapshot.buffer for snapshot in (self.latest, self._pinned) if snapshot]
        buffer = self._buffers.take(layout.nbytes, kept, publication.version)
        snapshot = Snapshot(publication.version, layout, buffer, publication.canary)
        epoch = Epoch(-1, {}) if publication.quiet else self._sender.open(publication.version, self._clock())
        found = (
            self._send_ranks(publication, snapshot, epoch) if self.ranks else self._send(publication, snapshot, epoch)
        )
        gathered = time.monotonic()
        whole = self._source.gmac.whole(layout.digest, found) if self._verify else f"unverified-{publication.version}"
        snapshot.digests = Digests(buckets=tuple(found), whole=whole)
        snapshot.cost.gather_s = gathered - started - snapshot.cost.digest_s
        version = None if publication.quiet else snapshot.commit(list(epoch.members), epoch.number)
        with self._lock:
            self._coming = snapshot
        committing = publication.commit(snapshot, version) if publication.commit else None
        self._finish(snapshot)
        if version:
            self._mailbox.tell(m.Published(version=publication.version, cost=snapshot.cost))
        if committing:
            relayed = committing.result()  # its deadline is the mailbox's
            if version:
                self._sender.committed(publication.version, whole)
                self._missed(version, relayed)
        elif version:
            self._sender.committed(publication.version, whole)
            self._say(version)
        with self._lock:
            if self.latest and self._loads(self.latest) and not (self._pinned and self._loads(self._pinned)):
                self._pinned = self.latest
            self.latest, self._coming = snapshot, None
        publication.committed.set_result(None)
        if version:
            failpoint.reach("published", publication.version - 1)

    def _send(self, publication: Publication, snapshot: Snapshot, epoch: Epoch) -> list[str]:
        """A trainer of one rank on a CPU: bucket k is on its way while k + 1 is cast and hashed. Returns digests."""
        self._announce(snapshot, epoch)
        self._meet(snapshot, epoch, self._routes(snapshot, epoch))
        found = []
        for index, digest in self._source.buckets(snapshot.buffer.tensor, hashed=self._verify):
            found.append(digest or "")
            if snapshot.base and self.latest:
                changes.find(self.latest, snapshot, index)
            snapshot.buffer.filled(index + 1)
            self._broadcast.send(index, snapshot)
            failpoint.reach("publishing", publication.version)
        publication.read.set_result(None)
        return found

    def _send_ranks(self, publication: Publication, snapshot: Snapshot, epoch: Epoch) -> list[str]:
        """A trainer of several, or on GPUs: each sends its own rows (`rank_sender`). Returns the digests."""
        assert self.ranks and publication.trained
        if self._gpu:
            snapshot.buffer.pin()
        self._announce(snapshot, epoch)
        routes = self._routes(snapshot, epoch)
        outcome = self.ranks.send(
            snapshot.buffer,
            epoch.number,
            list(routes.values()),
            lambda: self._meet(snapshot, epoch, routes),
            self._verify,
            publication.trained,
            lambda: publication.read.set_result(None),
            lambda: failpoint.reach("publishing", publication.version),
        )
        if snapshot.on_gpu and isinstance(self.ranks.stage, DeviceStage):
            self.ranks.stage.copy_whole(snapshot.on_gpu[0])  # who maps it looks once the version is committed
        if snapshot.base and self.latest:
            for index in range(len(snapshot.layout.spans)):
                changes.find(self.latest, snapshot, index)
        snapshot.buffer.filled(len(snapshot.layout.spans))
        self._broadcast.drop(outcome.broke, publication.version)
        snapshot.cost.transfer_s = outcome.transfer_s
        return outcome.digests

    def _routes(self, snapshot: Snapshot, epoch: Epoch) -> dict[Backend, CollectiveRoute]:
        return self._broadcast.routes(
            epoch, snapshot.base, lambda identity: len(self._ways.places[identity]), self._source.cut,
            self._source.layout.nbytes,
        )  # fmt: skip

    def _meet(self, snapshot: Snapshot, epoch: Epoch, routes: dict[Backend, CollectiveRoute]) -> list[BroadcastGroup]:
        def propose(targets: list[str], route: Route) -> None:
            self._propose(targets, epoch.number, snapshot, route)

        found = self._broadcast.meet(epoch, routes, snapshot.version, propose)
        there = {group.route.type for group in found}
        missed = [who for backend, route in routes.items() if backend not in there for who in route.ranks]
        if alone := self._sender.met(self._clock(), missed) if routes else []:
            remedy = "weights.transport=snapshot for whom the trainer cannot reach, and the others have a group again"
            log.error("no group meets: these ask for versions by themselves", receivers=alone, remedy=remedy)
        return found

    def _loads(self, snapshot: Snapshot) -> bool:
        """Somebody is not done with it."""
        return any(p.loading and p.loading[1] == snapshot.version for p in self._sender.peers.values())

    def _announce(self, snapshot: Snapshot, epoch: Epoch) -> None:
        """Proposes the version to the members that take it by themselves, by their routes."""
        if self.latest and changes.are_sent(
            self._config, self._sender.peers.values(), epoch, self.latest, snapshot, self._source.cut.ranks
        ):
            snapshot.base = self.latest.digest
        if (on_gpu := epoch.by("cuda_ipc")) and self._gpu_copies:
            others = [each.on_gpu[0].data_ptr() for each in (self.latest, self._pinned) if each and each.on_gpu]
            snapshot.on_gpu = self._gpu_copies.take(others)
            self._propose(on_gpu, epoch.number, snapshot, snapshot.on_gpu[1])
        if snapshot.buffer.is_named and (sharing := epoch.by("shm")):
            self._propose(sharing, epoch.number, snapshot, SharedMemoryRoute(segment=snapshot.buffer.name))
        if asking := epoch.by("snapshot"):
            self._propose(asking, epoch.number, snapshot, SnapshotRoute())

    def _finish(self, snapshot: Snapshot) -> None:
        if snapshot.base:
            snapshot.cost.density = changes.density(snapshot)
        self._broadcast.finish(snapshot)
        if self._broadcast.broken:
            self._sender.broken()

    # --- messages ----------------------------------------------------------------------------------------------------

    def _propose(self, targets: list[str], epoch: int, snapshot: Snapshot, route: Route) -> None:
        self._say(
            m.Propose(
                targets=targets,
                epoch=epoch,
                version=snapshot.version,
                layout=snapshot.layout.digest,
                route=route,
                snapshots=self._snapshots.address,
                advertised=self._config.snapshot_advertise,
            )
        )

    def _say(self, message: m.Invite | m.Propose | m.CommitVersion) -> None:
        """Sends it; who was not there to hear it is offered the version again."""

        def answered(future: Future[m.Message]) -> None:
            error = future.exception()
            self._missed(message, future.result() if error is None else None, str(error or ""))

        self._mailbox.ask_later(message, SAY_DEADLINE_S).add_done_callback(answered)

    def _missed(
        self, message: m.Invite | m.Propose | m.CommitVersion | None, reply: m.Message | None, error: str = ""
    ) -> None:
        """Those whom ``message`` did not reach are offered the version again."""
        if message is None or isinstance(message, m.Invite):
            return
        absent = reply.absent if isinstance(reply, m.Relayed) else message.targets
        for identity in absent:
            reason = f"it did not hear of the version: {error or 'it is not with the broker'}"
            failed = m.LoadFailed(receiver=identity, epoch=message.epoch, version=message.version, error=reason)
            self._events.put(failed)

    def _route_alone(self, identity: str, transport: Transport, snapshot: Snapshot) -> Route:
        """How one rollout is served from a version that is all there: from shared memory, where it can."""
        if snapshot.buffer.is_named and (transport == "shm" or self._ways.share_memory(identity)):
            return SharedMemoryRoute(segment=snapshot.buffer.name)
        if transport == "cuda_ipc" and snapshot.on_gpu:
            return snapshot.on_gpu[1]
        return SnapshotRoute()

    def _answer_fetch(self, fetch: m.Fetch) -> m.Message:
        """Called from the snapshot server's thread."""
        with self._lock:
            there = [snapshot for snapshot in (self._coming, self.latest, self._pinned) if snapshot]
        return answer(there, fetch)
