"""One version as it is published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from penstock.protocols.messages import Canary, CommitVersion, Fetch, Message, PublishCost, Refused
from penstock.protocols.versions import CudaIpcRoute, Digests, Layout
from penstock.services.weights.buffers import HostBuffer
from penstock.services.weights.byte_views import as_memory
from penstock.services.weights.transports.bucket_server import bucket_reply


@dataclass(slots=True)
class Snapshot:
    """Filled bucket by bucket, complete once it has digests. Late rollouts are seeded from the latest one."""

    version: int
    layout: Layout
    buffer: HostBuffer
    """A segment where rollouts may be on this host, else memory of this process."""
    canary: Canary | None
    base: str = ""
    """Digest of the version that ``changes`` are against; empty where there are none."""
    changes: dict[int, bytes] = field(default_factory=dict)
    """Bucket to its changes (`services.weights.delta`), where they are smaller than the bucket."""
    digests: Digests | None = None
    cost: PublishCost = field(default_factory=PublishCost)
    on_gpu: tuple[torch.Tensor, CudaIpcRoute] | None = None
    """The same bytes on the trainer's GPU, where a rollout shares it; and how they are mapped."""

    @property
    def digest(self) -> str:
        """Of the whole version."""
        assert self.digests
        return self.digests.whole

    def commit(self, targets: list[str], epoch: int) -> CommitVersion:
        """What ``targets`` are told of it once it is complete."""
        assert self.digests
        return CommitVersion(
            targets=targets, epoch=epoch, version=self.version, digests=self.digests, canary=self.canary
        )

    def bucket(self, index: int) -> memoryview:
        """The bytes of one bucket."""
        start, end = self.layout.spans[index]
        return as_memory(self.buffer.tensor)[start:end]


def answer(there: Sequence[Snapshot], fetch: Fetch) -> Message:
    """The bucket that is asked for, of the versions that are ``there``, the latest first; or why there is none."""
    snapshot = next((s for s in there if (s.version, s.digest) == (fetch.version, fetch.digest)), None)
    if snapshot is None:
        has = f"version {there[0].version}" if there else "no version"
        away = "gone" if there and fetch.version <= there[0].version else "not here yet"
        return Refused(code="not_ready", reason=f"version {fetch.version} is {away}; the snapshot is {has}")
    if not 0 <= fetch.index < len(snapshot.layout.spans):
        return Refused(code="bad_message", reason=f"there is no bucket {fetch.index}")
    known = snapshot.changes.get(fetch.index) if snapshot.base and fetch.held == snapshot.base else None
    return bucket_reply(fetch.version, fetch.index, snapshot.bucket(fetch.index), known)
