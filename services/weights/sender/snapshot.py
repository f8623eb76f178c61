"""One version as it is published."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from penstock.protocols.messages import Canary, PublishCost
from penstock.protocols.versions import Digests, Layout
from penstock.services.weights.buffers import HostBuffer
from penstock.services.weights.byte_views import as_memory


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
        return as_memory(self.buffer.tensor)[start:end]
