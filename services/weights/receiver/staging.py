"""Where a version arrives before it serves: the sender's shared-memory segment itself, or one of two buffers of this
process, of which the other one serves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from penstock.protocols.versions import Layout
from penstock.services.weights.buffers import SharedBuffer, path_of
from penstock.services.weights.byte_views import from_memory
from penstock.services.weights.layout import view_weights
from penstock.services.weights.receiver.loader import MappedVersion
from penstock.services.weights.transports import shared_memory


@dataclass
class StagingBuffer:
    """A flat buffer, uint8 ``[bytes]`` on the host, and what must be let go of once nobody computes with it."""

    tensor: torch.Tensor
    layout: Layout
    attached: shared_memory.Attached | None = None
    shared: SharedBuffer | None = None
    """Where the tensor lies, if the engine has other processes that must find it."""

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        """The version's tensors, as they lie in it."""
        return view_weights(self.layout, self.tensor)

    @property
    def memory(self) -> MappedVersion | None:
        """For an engine whose weights lie in other processes."""
        if self.attached:
            return MappedVersion(path_of(self.attached.file), shared_memory.HEADER_BYTES, self.layout)
        return MappedVersion(self.shared.path, 0, self.layout) if self.shared else None

    def release(self) -> None:
        """Nobody computes with it any more."""
        if self.attached:
            self.attached.release()


class StagingBuffers:
    """Those of one rollout. ``remote``: the engine's weights lie in other processes."""

    def __init__(self, remote: bool) -> None:
        self._remote = remote
        self._attachments = shared_memory.Attachments()
        self._own: list[StagingBuffer] = []

    def attach(self, segment: str, layout: Layout) -> StagingBuffer:
        """The sender's segment. Raises `DigestError` where there is none of that size."""
        attached = self._attachments.attach(segment, layout.nbytes)
        return StagingBuffer(from_memory(attached.memory), layout, attached)

    def spare(self, layout: Layout, serving: StagingBuffer | None) -> StagingBuffer:
        """A buffer of this process that is not ``serving``."""
        free = [own for own in self._own if own is not serving and own.layout.digest == layout.digest]
        spare = free[0] if free else self._new(layout)
        self._own = [own for own in (spare, serving) if own and not own.attached]
        return spare

    def _new(self, layout: Layout) -> StagingBuffer:
        if self._remote:
            shared = SharedBuffer(layout.nbytes)
            return StagingBuffer(shared.tensor, layout, shared=shared)
        return StagingBuffer(torch.zeros(layout.nbytes, dtype=torch.uint8), layout)
