"""Receives versions into a shadow and verifies them, in a thread beside decoding. The engine computes with the shadow
as it lies, once it is verified and swapped in."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog

from penstock.protocols.digests import Gmac
from penstock.protocols.keys import ClientKeys
from penstock.protocols.mailbox import Mailbox
from penstock.protocols.messages import Bucket, Canary, CommitVersion, Invite, Loaded, LoadFailed, Place, Propose, Reach
from penstock.protocols.versions import (
    CollectiveRoute,
    CudaIpcRoute,
    DigestError,
    Layout,
    SharedMemoryRoute,
)
from penstock.protocols.weight_channel import BucketError, VersionAssembly, name_buckets
from penstock.services.modeling.whole_weights import AdapterBase, is_alone
from penstock.services.runtime import failpoint
from penstock.services.weights import queues
from penstock.services.weights.buffers import MappedBuffer
from penstock.services.weights.byte_views import as_memory, copy_bytes
from penstock.services.weights.config import WeightsConfig
from penstock.services.weights.parts import runs_of
from penstock.services.weights.receiver.canary import check_canary
from penstock.services.weights.receiver.costs import Costs
from penstock.services.weights.receiver.loader import WeightLoader
from penstock.services.weights.receiver.staging import DeviceRing, Scraps, Staging, StagingBuffer
from penstock.services.weights.transports import cuda_ipc, shared_memory
from penstock.services.weights.transports.broadcast_group import BroadcastGroup, CollectiveError
from penstock.services.weights.transports.bucket_server import BucketClient

log = structlog.get_logger()

POLL_S = 0.0005
SWAP_POLL_S = 0.2
TRIES = 3
"""How often a wrong bucket is asked for again before the version is given up."""


@dataclass(frozen=True)
class Prepared:
    """A verified version, ready to be swapped in between two decoding steps. Posted to the actor's inbox."""

    weights: Any
    loaded: Loaded
    """What is said of it, but for the pause."""
    swapped: threading.Event
    """Set once it serves."""
    canary: Canary | None = None
    """To be checked once it is swapped in, where the engine cannot score before."""


class Receiver:
    """Takes one proposal at a time, always the newest. ``verify=False`` leaves out digests, to measure their cost.
    ``deliver`` is given what is ready to be swapped in; by default it goes to the actor's inbox. ``base``: what
    adapters are merged with that are published alone; None: they are handed on. ``at_work``: around what it does on the
    engine's device."""

    def __init__(
        self,
        engine: WeightLoader,
        mailbox: Mailbox,
        config: WeightsConfig,
        keys: ClientKeys | None = None,
        verify: bool = True,
        deliver: Callable[[Prepared], None] | None = None,
        base: AdapterBase | None = None,
        at_work: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._engine, self._mailbox, self._config, self._keys, self._verify = engine, mailbox, config, keys, verify
        self._deliver, self._base, self._at_work = deliver or mailbox.post, base, at_work
        self._serves_itself = deliver is None
        """What was swapped in serves; else others have a word in it."""
        self._forgotten: deque[tuple[int, int]] = deque(maxlen=64)
        self._proposals: queue.SimpleQueue[Propose | None] = queue.SimpleQueue()
        self._commits: dict[tuple[int, int], CommitVersion] = {}
        self._changed = threading.Condition()
        self._newest: tuple[int, int] | None = None
        self._layout: Layout | None = None
        """What the trainer that has invited this rollout publishes."""
        self._gmac: Gmac | None = None
        self._staging = Staging(engine.remote)
        self._serving: StagingBuffer | None = None
        self._served = -1, ""
        """Its version and digest."""
        self._group: BroadcastGroup | None = None
        self._landing: queues.Queue | None = None
        """Where buckets that come to a GPU are hashed, and copied to the host."""
        self._snapshots: BucketClient | None = None
        self._closing = False
        for heard in (Invite, Propose, CommitVersion):
            mailbox.handlers[heard] = self.handle
        self._thread = threading.Thread(target=self._run, name="receiver", daemon=True)
        self._thread.start()

    def handle(self, message: Invite | Propose | CommitVersion) -> None:
        """What the trainer says, heard in the mailbox's thread, not behind a decoding step; returns at once."""
        if isinstance(message, Invite):
            only = None if self._config.transport == "auto" else self._config.transport
            gpu, nonce = cuda_ipc.gpu_of(self._engine.device), shared_memory.read_probe(message.probe)
            self._layout, self._gmac = message.layout, Gmac(bytes(message.key))
            place = Place(nonce=nonce, host=self._config.host, gpu=gpu)
            newest = self._newest[0] if self._newest else -1
            reach = Reach(layout=self._layout.digest, places=[place], newest=newest, only=only)
            self._mailbox.ask_later(reach, self._config.deadline_s)
            return
        with self._changed:
            at = message.epoch, message.version
            if isinstance(message, Propose):
                if at == self._newest:
                    return  # said again: its line broke
                if self._newest is not None and at < self._newest:
                    log.warning("an old proposal is refused", epoch=at[0], version=at[1], newest=self._newest)
                    return
                self._newest = at
                self._proposals.put(message)
            else:
                self._commits[at] = message
                for old in [known for known in self._commits if self._newest and known < self._newest]:
                    del self._commits[old]
            self._changed.notify_all()

    def forget(self, epoch: int, version: int) -> None:
        """This version will not be swapped in: another worker of the engine could not load it, or the trainer offers it
        again. One before it may be being loaded, and stays as it is."""
        with self._changed:
            self._forgotten.append((epoch, version))
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread after the proposal in hand."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._proposals.put(None)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        queues.use_device(self._engine.device)
        while (proposal := self._proposals.get()) is not None:
            try:
                self._load(proposal)
            except Exception as error:  # whatever went wrong, the version is not served and the sender hears why
                log.warning("version not loaded", epoch=proposal.epoch, version=proposal.version, error=str(error))
                reason = f"{type(error).__name__}: {error}"
                failed = LoadFailed(epoch=proposal.epoch, version=proposal.version, error=reason)
                self._mailbox.ask_later(failed, self._config.deadline_s)
        if self._snapshots:
            self._snapshots.close()

    def _load(self, proposal: Propose) -> None:
        if self._newest != (proposal.epoch, proposal.version):
            raise DigestError("a newer version was proposed")
        failpoint.reach("receiver-proposed", proposal.version)
        layout = self._layout
        if layout is None or self._gmac is None or layout.digest != proposal.layout:
            raise DigestError(f"the version has layout {proposal.layout}, the invitation brought another")
        intake = VersionAssembly(proposal.epoch, proposal.version, layout, self._gmac, share=proposal.share)
        shadow = self._staging.open(proposal, layout, self._serving)
        costs = Costs()
        if self._serving and self._serving.buffer is shadow.buffer:  # the other workers do not have that one any more
            self._serving, self._served = None, (-1, "")
        try:
            _ = shadow.weights  # looked up now, while the first bucket is gathered: after the commit everybody waits
            started = time.monotonic()
            self._receive(proposal, intake, shadow, costs)
            failpoint.reach("receiver-received", proposal.version)
            commit = self._await_commit(proposal)
            costs.receive_s = time.monotonic() - started - costs.hash_s
            offered = commit.version, commit.digests.whole
            if self._serves_itself and offered == self._served:  # while the engine ended what it had in flight
                shadow.release()
                again = costs.loaded(proposal, commit, 0.0)
                self._mailbox.ask_later(again, self._config.deadline_s)
                return
            shadow = self._settle(proposal, commit, intake, shadow, costs)
            failpoint.reach("receiver-verified", proposal.version)
            with self._at_work():
                prepared, canary = self._prepare(commit, shadow, costs)
            later = commit.canary if self._engine.remote else None
            self._swap(Prepared(prepared, costs.loaded(proposal, commit, canary), threading.Event(), later))
        except BaseException:
            shadow.release()
            raise
        before, self._serving, self._served = self._serving, shadow, offered
        if before:
            before.release()

    def _swap(self, prepared: Prepared) -> None:
        """Until the actor has swapped it in, this version may be neither overwritten nor let go of."""
        self._deliver(prepared)
        at = prepared.loaded.epoch, prepared.loaded.version
        while not prepared.swapped.wait(SWAP_POLL_S):
            if self._closing:
                raise DigestError("closed before it was swapped in")
            if at in self._forgotten:
                raise DigestError("another worker of the engine could not load it, or it was offered again")

    def _receive(self, proposal: Propose, intake: VersionAssembly, shadow: StagingBuffer, costs: Costs) -> None:
        """Takes what comes by itself. What does not arrive is asked for once the version is committed."""
        memory, spans = as_memory(shadow.tensor), shadow.layout.spans

        def arrived(index: int, digest: str | None = None) -> None:
            started = time.monotonic()
            start, end = spans[index]
            if failpoint.due("receiver-flipped", proposal.version):
                memory[start] ^= 1
            if digest is None:
                digest = intake.gmac.bucket(memory[start:end]) if self._verify else ""
            intake.bucket(proposal.epoch, proposal.version, index, memory[start:end], digest)
            failpoint.reach("receiver-bucket", proposal.version)
            costs.hash_s += time.monotonic() - started

        route = proposal.route
        if isinstance(route, CollectiveRoute):
            self._receive_broadcast(proposal, route, shadow, intake, arrived, costs)
        elif isinstance(route, SharedMemoryRoute) and self._verify:
            self._follow(proposal, shadow, arrived)
        elif isinstance(route, CudaIpcRoute):
            self._await_commit(proposal)
            shadow.tensor.copy_(cuda_ipc.map_shared(route, shadow.layout.nbytes, self._engine.device))
            for index in range(len(spans)):
                arrived(index)

    def _follow(self, proposal: Propose, shadow: StagingBuffer, arrived: Callable[[int], None]) -> None:
        """Hashes the buckets of a segment while the sender writes the next ones."""
        segment, buckets = shadow.buffer, len(shadow.layout.spans)
        assert isinstance(segment, MappedBuffer)
        patience_s = self._config.patience_s(shadow.layout.nbytes)
        index, deadline = 0, time.monotonic() + patience_s
        while index < buckets:
            filled = segment.filled(proposal.version)
            if filled == index:
                if self._given_up(proposal):
                    raise DigestError("a newer version was proposed")
                if time.monotonic() > deadline:
                    raise DigestError(f"the trainer did not fill bucket {index} of segment within {patience_s:g} s")
                time.sleep(POLL_S)
            for full in range(index, filled):
                arrived(full)
            index = max(index, filled)

    def _receive_broadcast(
        self,
        proposal: Propose,
        route: CollectiveRoute,
        shadow: StagingBuffer,
        intake: VersionAssembly,
        arrived: Callable[..., None],
        costs: Costs,
    ) -> None:

        def landed(index: int, land: Callable[[int], str | None] = lambda _: None) -> None:
            if index in intake.wanted:
                arrived(index, land(index))

        identity = self._mailbox.identity
        if identity not in route.ranks:
            raise DigestError(f"{identity} has no rank in epoch {proposal.epoch}")
        if route.sparse_from:
            if self._serving is None or route.sparse_from != self._served[1]:
                raise DigestError("changes are sent to a version that is not served here")
            for index in intake.wanted:
                copy_bytes(self._serving.bucket(index), shadow.bucket(index))
        try:
            if self._group is None or self._group.epoch != proposal.epoch or self._group.route.type != route.type:
                if self._group:
                    self._group.close()
                if route.type == "nccl":  # before anybody waits for a bucket to move
                    self._staging.register(proposal.share, shadow.layout.nbytes)
                runs_of(shadow.layout, route.cut)  # found before others wait in the group
                rank, device = route.ranks[identity], self._engine.device
                self._group = BroadcastGroup(route, proposal.epoch, rank, self._config.host, device=device)
            self._group.route = route
            self._group.bytes_received = 0
            if route.type == "nccl":
                self._landing = self._landing or queues.make_queue(self._engine.device)
                with self._landing.running():
                    ring = DeviceRing(shadow, self._engine.device, intake.gmac if self._verify else None)
                    self._group.receive(shadow.layout, ring.bucket, lambda index: landed(index, ring.land))
            else:
                room = Scraps(shadow, intake.wanted) if proposal.share else shadow
                self._group.receive(shadow.layout, room.bucket, landed)
            costs.bytes_received += self._group.bytes_received
        except CollectiveError as error:
            self._group = None
            log.warning("broadcast broke", version=proposal.version, error=str(error))
        except BaseException:  # of ours, with others' broadcasts in line: nobody would finish them
            if self._group:
                self._group.abort()
            self._group = None
            raise

    def _given_up(self, proposal: Propose) -> bool:
        """The sender has proposed something newer, or this rollout leaves."""
        at = proposal.epoch, proposal.version
        return self._closing or self._newest != at or at in self._forgotten

    def _await_commit(self, proposal: Propose) -> CommitVersion:
        patience_s = self._config.patience_s(self._layout.nbytes if self._layout else 0)
        at, deadline = (proposal.epoch, proposal.version), time.monotonic() + patience_s
        with self._changed:
            while at not in self._commits:
                left = deadline - time.monotonic()
                if self._given_up(proposal):
                    raise DigestError(f"version {proposal.version} was given up: a newer one was proposed")
                if left <= 0:
                    raise DigestError(f"the trainer did not commit version {proposal.version} within {patience_s:g} s")
                self._changed.wait(left)
            return self._commits[at]

    def _settle(
        self, proposal: Propose, commit: CommitVersion, intake: VersionAssembly, shadow: StagingBuffer, costs: Costs
    ) -> StagingBuffer:
        """Compares with the manifest, and asks again for what is missing or wrong. Returns a shadow that is right."""
        started = time.monotonic()
        if not self._verify:
            return shadow
        for index, reason in intake.commit(proposal.epoch, proposal.version, commit.digests).items():
            log.warning("a bucket is refused", version=proposal.version, bucket=index, reason=reason)
        costs.verify_s += time.monotonic() - started
        if intake.missing:
            started = time.monotonic()
            costs.again += 0 if proposal.route.type == "snapshot" else len(intake.missing)
            shadow = self._fetch(proposal, commit, intake, shadow, costs)
            costs.receive_s += time.monotonic() - started
        if intake.whole() != commit.digests.whole:
            raise DigestError(f"buckets {name_buckets(intake.missing)} are missing or wrong")
        return shadow

    def _fetch(
        self, proposal: Propose, commit: CommitVersion, intake: VersionAssembly, shadow: StagingBuffer, costs: Costs
    ) -> StagingBuffer:
        if isinstance(shadow.buffer, MappedBuffer):  # a segment is not ours to mend
            mended = self._staging.spare(shadow.layout, self._serving)
            copy_bytes(shadow.tensor, mended.tensor)
            shadow.release()
            shadow = mended
        place = proposal.place_for(self._config.transport)
        if self._snapshots is None or self._snapshots.address != place:
            if self._snapshots:
                self._snapshots.close()
            self._snapshots = BucketClient(place, self._mailbox.identity, self._keys)
        into = shadow.tensor.numpy()

        def arrived(bucket: Bucket, data: np.ndarray) -> None:
            try:
                intake.bucket(proposal.epoch, bucket.version, bucket.index, data.data)
            except BucketError as error:
                log.warning("a bucket is refused", version=proposal.version, bucket=bucket.index, reason=str(error))
                return
            start, end = intake.layout.spans[bucket.index]
            into[start:end] = data

        base = (self._served[1], self._serving.tensor) if self._serving else None
        for _ in range(TRIES):
            if not intake.missing or self._newest != (proposal.epoch, proposal.version):
                break
            costs.bytes_received += self._snapshots.fetch(
                proposal.version, commit.digests.whole, intake.layout, intake.missing, base, arrived,
                self._config.stall_s,
            )  # fmt: skip
        return shadow

    def _prepare(self, commit: CommitVersion, shadow: StagingBuffer, costs: Costs) -> tuple[Any, float]:
        started = time.monotonic()
        weights: Mapping[str, Any] = shadow.weights
        if self._base and is_alone(weights):
            prepared = self._engine.prepare(self._base.whole(weights, self._engine.device))
        else:
            prepared = self._engine.prepare(weights, shadow.memory if self._engine.remote else None)
        difference = 0.0
        if commit.canary and not self._engine.remote:
            difference = check_canary(self._engine, prepared, commit.canary)
        costs.prepare_s = time.monotonic() - started
        return prepared, difference
