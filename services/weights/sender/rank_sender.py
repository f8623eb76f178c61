"""One version from a trainer of several ranks, or on GPUs: each rank sends its own rows; only digests are gathered.

    every rank  │ cast own rows, where they are │ broadcast them, bucket by bucket, each its root │ hash them │
    rank 0      │ … one snapshot of all, in host memory that the ranks of its host share …  │ put digests together │

The model is read in the first of these steps alone: it may change from then on, whoever stalls. On a GPU the cast rows
lie there (`device_stage`), NCCL sends them from there, and the snapshot is copied beside that. Ranks on other hosts
send their rows to rank 0 at the end, for the snapshot. All of it runs in a thread beside training's, over groups of its
own, on a queue of its own: no collective of training waits for one of these, nor the other way round (docs/weights.md).
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.distributed as dist

from penstock.protocols import wire
from penstock.protocols.digests import BLOCK, DIGEST_BYTES
from penstock.protocols.versions import CollectiveRoute
from penstock.services.modeling.pinned import pin, unpin
from penstock.services.modeling.resting import forget, release, remember
from penstock.services.weights.buffers import HostBuffer
from penstock.services.weights.byte_views import as_memory, from_memory
from penstock.services.weights.parts import packed, runs_of, unpack
from penstock.services.weights.queues import Event, HostQueue, make_queue, use_device
from penstock.services.weights.sender.device_stage import BucketStage, DeviceStage
from penstock.services.weights.sender.shard_exporter import ShardExporter
from penstock.services.weights.transports import cuda_ipc
from penstock.services.weights.transports.broadcast_group import BroadcastGroup, CollectiveError

log = structlog.get_logger()

MAPPINGS = 8
"""Of rank 0's buffers; it fills them in turn."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Outcome:
    """What rank 0 knows of a version once all ranks are done with it."""

    digests: list[str]
    """Of each bucket; empty strings where nothing was hashed."""
    broke: dict[str, str]
    """Why a backend's group ended early, with this rank or another."""
    transfer_s: float
    """From the first bucket until the last was sent."""


class RankSender:
    """This rank's side; all ranks make theirs at once. `send` is rank 0's, `follow` the others': each call is one
    version, and all ranks make it. ``shared``: its GPU is the rollouts' while it rests, and versions go by the host."""

    def __init__(self, source: ShardExporter, host: str, shared: bool = False) -> None:
        self._source, self._world, self._host = source, source.world, host
        self._runs = runs_of(source.layout, source.cut)
        gpu = cuda_ipc.gpu_of(source.device)
        self.gpus = [said.decode() for said in self._world.gather(gpu.encode(), self._world.publish_group)]
        """All ranks', as `cuda_ipc.gpu_of` has them."""
        self._groups: dict[str, BroadcastGroup] = {}
        self.stage: DeviceStage | BucketStage | None = None
        """Where the model is on a GPU."""
        if source.device.type == "cuda":
            mine = [bucket[self._world.rank] for bucket in self._runs]
            self.stage = (BucketStage if shared else DeviceStage)(
                source.layout, source.pieces, mine, source.device, make_queue(source.device), source.gmac
            )
        self._own: torch.Tensor | None = None
        """Of a rank on another host than rank 0's."""
        self._maps: dict[tuple[int, int], torch.Tensor] = {}
        self._pinned: set[tuple[int, int]] = set()

    def rest(self) -> None:
        """Gives its device's memory back, once nothing is under way there: until `wake` nothing is published."""
        if self.stage:
            forget([self.stage.bytes])
            release(self._source.device)

    def wake(self) -> None:
        """Takes it again."""
        if self.stage:
            remember([self.stage.bytes])

    def send(
        self,
        buffer: HostBuffer,
        epoch: int,
        routes: Sequence[CollectiveRoute],
        meet: Callable[[], Sequence[BroadcastGroup]],
        hashed: bool,
        trained: Event,
        read: Callable[[], None],
        bucket_sent: Callable[[], None],
    ) -> Outcome:
        """Rank 0: fills ``buffer``, which is a shared one, and broadcasts by ``routes``, in the groups that ``meet``
        returns. The model is read behind ``trained``; ``read`` is called once no rank reads it any more."""
        stat = Path(buffer.path).stat()
        order = {
            "boot": _boot(), "path": buffer.path, "offset": buffer.offset, "inode": [stat.st_dev, stat.st_ino],
            "hashed": hashed, "epoch": epoch, "routes": [route.model_dump() for route in routes],
        }  # fmt: skip
        self._world.share(wire.pack(order), self._world.publish_group)
        ready = self._read(buffer.tensor, trained)
        self._world.gather(b"", self._world.publish_group)
        read()
        copied = self._copy(buffer.tensor)
        groups = meet() if routes else []
        began = time.monotonic()
        broke = self._broadcast(groups, buffer.tensor, ready, copied, bucket_sent)
        transfer_s = time.monotonic() - began
        parts = self._world.gather(self._parts(buffer.tensor) if hashed else b"", self._world.publish_group)
        copied.synchronize()
        self._receive_rows(buffer.tensor)
        for said in self._world.gather(json.dumps(broke).encode(), self._world.publish_group):
            broke = json.loads(said) | broke
        return Outcome(self._put_together(parts, hashed), broke, transfer_s)

    def follow(self, trained: Event, read: Callable[[], None]) -> None:
        """The other ranks: as rank 0 says. The model is read behind ``trained``; ``read`` is called once this rank has
        read it."""
        use_device(self._source.device)
        order = wire.unpack(self._world.share(b"", self._world.publish_group))
        mapped = self._map(order)
        target = mapped if mapped is not None else self._private()
        ready = self._read(target, trained)
        read()
        copied = self._copy(target)
        self._world.gather(b"", self._world.publish_group)
        groups, away = self._join(order)
        broke = away | self._broadcast(groups, target, ready, copied, lambda: None)
        for backend, error in broke.items():
            if group := self._groups.pop(backend, None):
                group.abort()
            log.warning("broadcast broke", error=error)
        self._world.gather(self._parts(target) if order["hashed"] else b"", self._world.publish_group)
        copied.synchronize()
        if mapped is None:
            self._send_rows(target)
        else:
            self._world.gather(b"", self._world.publish_group)
        self._world.gather(json.dumps(broke).encode(), self._world.publish_group)

    def _read(self, target: torch.Tensor, trained: Event) -> Event:
        """Casts this rank's rows: where there is no `stage`, into ``target``. Returns when they are there."""
        if self.stage is None:
            self._source.write(target)
            return HostQueue().mark()
        return self.stage.read(self._source.putter(), trained, target)

    def _copy(self, target: torch.Tensor) -> Event:
        """Begins to bring them to ``target``, on the host. Returns when they are all there."""
        return self.stage.copy_to(target) if self.stage else HostQueue().mark()

    # --- the broadcast -----------------------------------------------------------------------------------------------

    def _broadcast(
        self,
        groups: Sequence[BroadcastGroup],
        target: torch.Tensor,
        ready: Event,
        copied: Event,
        bucket_sent: Callable[[], None],
    ) -> dict[str, str]:
        """Returns what broke, by backend."""
        layout, rank = self._source.layout, self._world.rank

        def from_host(index: int) -> torch.Tensor:
            start, end = layout.spans[index]
            return packed(target[start:end], self._runs[index][rank])

        broke: dict[str, str] = {}

        def exchange(group: BroadcastGroup) -> None:
            use_device(self._source.device)
            stage = self.stage if group.route.type == "nccl" and isinstance(self.stage, DeviceStage) else None
            if stage is None:
                copied.synchronize()
            try:
                group.exchange(self._runs, stage.bucket if stage else from_host, ready, bucket_sent)
            except CollectiveError as error:
                broke[group.route.type] = str(error)

        # At once: one that stalls does not hold up the others.
        others = [threading.Thread(target=exchange, args=(group,), name="exchange") for group in groups[1:]]
        for other in others:
            other.start()
        for group in groups[:1]:
            exchange(group)
        for other in others:
            other.join()
        return broke

    def _join(self, order: dict[str, Any]) -> tuple[list[BroadcastGroup], dict[str, str]]:
        before, self._groups = self._groups, {}
        broke: dict[str, str] = {}
        routes = [CollectiveRoute.model_validate(told) for told in order["routes"]]
        for backend, old in before.items():
            if old.epoch != order["epoch"] or backend not in [route.type for route in routes]:
                old.close()
        for route in routes:
            group = before.get(route.type)
            try:
                if group is None or group.epoch != order["epoch"]:
                    rank = self._world.rank
                    group = BroadcastGroup(route, order["epoch"], rank, self._host, device=self._source.device)
                group.route = route
                self._groups[route.type] = group
            except CollectiveError as error:
                broke[route.type] = str(error)
        return list(self._groups.values()), broke

    # --- digests -----------------------------------------------------------------------------------------------------

    def _parts(self, target: torch.Tensor) -> bytes:
        """What this rank's rows add to each bucket's digest."""
        if self.stage is not None:
            buckets = range(len(self._source.layout.spans))
            return b"".join(self.stage.part(index).to_bytes(DIGEST_BYTES) for index in buckets)
        memory, gmac, found = as_memory(target), self._source.gmac, bytearray()
        for (begin, end), runs in zip(self._source.layout.spans, self._runs, strict=True):
            blocks, total = -(-(end - begin) // BLOCK), 0
            for run in runs[self._world.rank]:
                first, last = run.start // BLOCK, -(-(run.start + run.nbytes) // BLOCK)
                data: memoryview | bytes = memory[begin + run.start : begin + run.start + run.nbytes]
                if run.nbytes != BLOCK * (last - first):  # others' bytes beside it count as zeros here
                    before = bytes(run.start - BLOCK * first)
                    data = before + bytes(data) + bytes(BLOCK * (last - first) - len(before) - run.nbytes)
                total ^= gmac.part(data, blocks - last)
            found += total.to_bytes(DIGEST_BYTES)
        return bytes(found)

    def _put_together(self, parts: list[bytes], hashed: bool) -> list[str]:
        spans = self._source.layout.spans
        if not hashed:
            return [""] * len(spans)
        return [
            self._source.gmac.put_together(
                [int.from_bytes(part[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)]) for part in parts], end - start
            )
            for index, (start, end) in enumerate(spans)
        ]

    # --- the snapshot ------------------------------------------------------------------------------------------------

    def _map(self, order: dict[str, Any]) -> torch.Tensor | None:
        """Rank 0's buffer, where this rank is on its host; None elsewhere."""
        path, offset = order["path"], order["offset"]
        if order["boot"] != _boot():
            return None
        try:
            with open(path, "r+b") as file:  # noqa: PTH123 - a Path would be resolved to the name, which may be gone
                stat = os.fstat(file.fileno())
                key = stat.st_dev, stat.st_ino
                if list(key) != order["inode"]:
                    return None
                if key not in self._maps:
                    while len(self._maps) >= MAPPINGS:
                        self._forget(next(iter(self._maps)))
                    self._maps[key] = from_memory(memoryview(mmap.mmap(file.fileno(), 0)))
                    if self.stage and pin(self._maps[key]):
                        self._pinned.add(key)
                return self._maps[key][offset : offset + self._source.layout.nbytes]
        except OSError:
            return None

    def _private(self) -> torch.Tensor:
        if self._own is None:
            self._own = torch.zeros(
                self._source.layout.nbytes, dtype=torch.uint8
            )  # pages of others' rows stay untouched, and so are not registered with CUDA
        return self._own

    def _forget(self, key: tuple[int, int]) -> None:
        mapped = self._maps.pop(key)
        if key in self._pinned:
            self._pinned.remove(key)
            unpin(mapped)

    def _send_rows(self, target: torch.Tensor) -> None:
        self._world.gather(b"mine", self._world.publish_group)
        for (start, end), runs in zip(self._source.layout.spans, self._runs, strict=True):
            mine = packed(target[start:end], runs[self._world.rank])
            if mine.numel():
                dist.send(mine, 0, group=self._world.publish_group)

    def _receive_rows(self, buffer: torch.Tensor) -> None:
        """Of ranks on other hosts."""
        elsewhere = [rank for rank, said in enumerate(self._world.gather(b"", self._world.publish_group)) if said]
        for rank in elsewhere:
            for (start, end), runs in zip(self._source.layout.spans, self._runs, strict=True):
                nbytes = sum(run.nbytes for run in runs[rank])
                if nbytes:
                    rows = torch.empty(nbytes, dtype=torch.uint8)
                    dist.recv(rows, rank, group=self._world.publish_group)
                    unpack(rows, buffer[start:end], runs[rank])


def _boot() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
