"""One version from a trainer of several ranks: each sends its own rows, and nothing is gathered but digests.

    every rank  │ cast own rows into host memory │ hash them │ broadcast them, bucket by bucket, each its root │
    rank 0      │ … one snapshot of all, in memory that the ranks of its host share …  │ put digests together   │

The model is read in the first of these steps alone: it may change from then on, whoever stalls. Ranks on other hosts
send their rows to rank 0 at the end, for the snapshot. All of it runs in a thread beside training's, over groups of its
own, on hosts: no collective of training waits for one of these, nor the other way round (docs/weights.md).
"""

from __future__ import annotations

import mmap
import os
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
from penstock.services.weights.buffers import HostBuffer
from penstock.services.weights.byte_views import as_memory, from_memory
from penstock.services.weights.parts import packed, runs_of, unpack
from penstock.services.weights.sender.shard_exporter import ShardExporter
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
    broke: CollectiveError | None
    """Why somebody's broadcast ended early."""


class RankSender:
    """This rank's side. `send` is rank 0's, `follow` the others': each call is one version, and all ranks make it."""

    def __init__(self, source: ShardExporter, host: str) -> None:
        self._source, self._world, self._host = source, source.world, host
        self._runs = runs_of(source.layout, source.world.size)
        self._groups: dict[str, BroadcastGroup] = {}
        self._own: torch.Tensor | None = None
        """Of a rank on another host than rank 0's."""
        self._maps: dict[tuple[int, int], torch.Tensor] = {}

    def send(
        self,
        buffer: HostBuffer,
        epoch: int,
        routes: Sequence[CollectiveRoute],
        meet: Callable[[], Sequence[BroadcastGroup]],
        hashed: bool,
        read: Callable[[], None],
        bucket_sent: Callable[[], None],
    ) -> Outcome:
        """Rank 0: fills ``buffer``, which is a shared one, and broadcasts by ``routes``, in the groups that ``meet``
        returns. ``read`` is called once no rank reads the model any more."""
        stat = Path(buffer.path).stat()
        order = {
            "boot": _boot(), "path": buffer.path, "offset": buffer.offset, "inode": [stat.st_dev, stat.st_ino],
            "hashed": hashed, "epoch": epoch, "routes": [route.model_dump() for route in routes],
        }  # fmt: skip
        self._world.share(wire.pack(order), self._world.publish_group)
        self._source.write(buffer.tensor)
        self._world.gather(b"", self._world.publish_group)
        read()
        broke = self._broadcast(meet() if routes else [], buffer.tensor, bucket_sent)
        parts = self._world.gather(self._parts(buffer.tensor) if hashed else b"", self._world.publish_group)
        self._receive_rows(buffer.tensor)
        failures = self._world.gather(str(broke or "").encode(), self._world.publish_group)
        said = [failure.decode() for failure in failures if failure]
        return Outcome(self._put_together(parts, hashed), broke or (CollectiveError(said[0]) if said else None))

    def follow(self, read: Callable[[], None]) -> None:
        """The other ranks: as rank 0 says. ``read`` is called once this rank has read the model."""
        order = wire.unpack(self._world.share(b"", self._world.publish_group))
        mapped = self._map(order)
        target = mapped if mapped is not None else self._private()
        self._source.write(target)
        read()
        self._world.gather(b"", self._world.publish_group)
        groups, away = self._join(order)
        broke = self._broadcast(groups, target, lambda: None) or away
        if broke:
            self._groups.clear()
            log.warning("broadcast broke", error=str(broke))
        self._world.gather(self._parts(target) if order["hashed"] else b"", self._world.publish_group)
        if mapped is None:
            self._send_rows(target)
        else:
            self._world.gather(b"", self._world.publish_group)
        self._world.gather(str(broke or "").encode(), self._world.publish_group)

    # --- the broadcast -----------------------------------------------------------------------------------------------

    def _broadcast(
        self, groups: Sequence[BroadcastGroup], target: torch.Tensor, bucket_sent: Callable[[], None]
    ) -> CollectiveError | None:
        layout, rank = self._source.layout, self._world.rank

        def mine(index: int) -> torch.Tensor:
            start, end = layout.spans[index]
            return packed(target[start:end], self._runs[index][rank])

        broke = None
        for group in groups:
            try:
                group.exchange(self._runs, mine, bucket_sent)
            except CollectiveError as error:
                broke = error
        return broke

    def _join(self, order: dict[str, Any]) -> tuple[list[BroadcastGroup], CollectiveError | None]:
        before, self._groups, broke = self._groups, {}, None
        for told in order["routes"]:
            route = CollectiveRoute.model_validate(told)
            group = before.get(route.type)
            try:
                if group is None or group.epoch != order["epoch"]:
                    device = self._source.device
                    group = BroadcastGroup(route, order["epoch"], self._world.rank, self._host, device=device)
                group.route = route
                self._groups[route.type] = group
            except CollectiveError as error:
                broke = error
        return list(self._groups.values()), broke

    # --- digests -----------------------------------------------------------------------------------------------------

    def _parts(self, target: torch.Tensor) -> bytes:
        """What this rank's rows add to each bucket's digest."""
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
                        del self._maps[next(iter(self._maps))]
                    self._maps[key] = from_memory(memoryview(mmap.mmap(file.fileno(), 0)))
                return self._maps[key][offset : offset + self._source.layout.nbytes]
        except OSError:
            return None

    def _private(self) -> torch.Tensor:
        if self._own is None:
            self._own = torch.zeros(
                self._source.layout.nbytes, dtype=torch.uint8
            )  # pages of others' rows stay untouched
        return self._own

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
