"""One version as it is published: a host buffer, its digests, and what changed since the version before."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from penstock.protocols.messages import Canary, PublishCost
from penstock.protocols.versions import Digests, Layout
from penstock.services.weights.byte_views import as_memory, from_memory
from penstock.services.weights.transports import shared_memory


@dataclass(slots=True)
class Snapshot:
    """Filled bucket by bucket, complete once it has digests. Late rollouts are seeded from the latest one."""

    version: int
    layout: Layout
    buffer: torch.Tensor
    """uint8 ``[bytes]`` on the host."""
    segment: shared_memory.Segment | None
    canary: Canary | None
    base: str = ""
    """Digest of the version that ``changes`` are against; empty where there are none."""
    changes: dict[int, bytes] = field(default_factory=dict)
    """Bucket to its changes (`services.weights.delta`), where they are smaller than the bucket."""
    digests: Digests | None = None
    cost: PublishCost = field(default_factory=PublishCost)
    on_gpu: torch.Tensor | None = None
    """The same bytes on the trainer's GPU, where a rollout shares it."""

    @property
    def digest(self) -> str:
        """Of the whole version."""
        assert self.digests
        return self.digests.whole

    def bucket(self, index: int) -> memoryview:
        """The bytes of one bucket."""
        start, end = self.layout.spans[index]
        return as_memory(self.buffer)[start:end]


class Buffers:
    """Where snapshots lie: in shared memory where rollouts may be on this host, else in memory of this process."""

    def __init__(self, run_key: str | None) -> None:
        self._pool = shared_memory.Pool(run_key) if run_key else None
        self._own: list[torch.Tensor] = []

    def take(
        self, version: int, nbytes: int, keep: list[Snapshot]
    ) -> tuple[torch.Tensor, shared_memory.Segment | None]:
        """A buffer to fill with ``version``, which is none of ``keep``'s."""
        if self._pool:
            segment = self._pool.take(version, nbytes, [snapshot.segment for snapshot in keep])
            return from_memory(segment.memory), segment
        kept = [snapshot.buffer for snapshot in keep]
        used = {buffer.data_ptr() for buffer in kept}
        free = [buffer for buffer in self._own if buffer.data_ptr() not in used]
        buffer = free[0] if free else torch.zeros(nbytes, dtype=torch.uint8)
        self._own = [*kept, buffer]
        return buffer, None

    def close(self) -> None:
        """Lets go of them."""
        self._own.clear()
        if self._pool:
            self._pool.close()
