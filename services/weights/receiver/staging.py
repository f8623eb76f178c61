"""A version that has arrived, or is arriving, and does not serve yet."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from penstock.protocols.digests import Gmac
from penstock.protocols.versions import Layout
from penstock.services.weights.buffers import HostBuffer, MappedBuffer
from penstock.services.weights.gpu_digest import GpuGmac
from penstock.services.weights.layout import view_weights
from penstock.services.weights.receiver.loader import MappedVersion
from penstock.services.weights.transports.broadcast_group import AHEAD


@dataclass
class StagingBuffer:
    """The sender's segment itself, or a buffer of this process, and what lies in it."""

    buffer: HostBuffer | MappedBuffer
    layout: Layout

    @property
    def tensor(self) -> torch.Tensor:
        """uint8 ``[bytes]`` on the host."""
        return self.buffer.tensor

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        """The version's tensors, as they lie in it."""
        return view_weights(self.layout, self.tensor)

    @property
    def memory(self) -> MappedVersion | None:
        """For an engine whose weights lie in other processes."""
        buffer = self.buffer
        return MappedVersion(buffer.path, buffer.offset, self.layout) if buffer.path else None

    def bucket(self, index: int) -> torch.Tensor:
        """The place of one bucket."""
        start, end = self.layout.spans[index]
        return self.tensor[start:end]

    def release(self) -> None:
        """Nobody computes with it any more."""
        if isinstance(self.buffer, MappedBuffer):
            self.buffer.release()


class DeviceRing:
    """Room on a GPU for a few buckets of a version that comes there and is kept on the host: never for all of it, which
    would take the KV cache's place. Digests are made on the GPU; ``gmac`` None: none are. Made and used in one queue,
    which is not the engine's: a decoding step may still read what it has freed."""

    def __init__(self, shadow: StagingBuffer, device: torch.device, gmac: Gmac | None) -> None:
        self._shadow = shadow
        size = min(shadow.layout.bucket_bytes, shadow.layout.nbytes)
        self._ring = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(AHEAD["nccl"] + 1)]
        self._digests = GpuGmac(gmac, device) if gmac else None
        if isinstance(shadow.buffer, HostBuffer):
            shadow.buffer.pin()

    def bucket(self, index: int) -> torch.Tensor:
        """Where a bucket arrives."""
        start, end = self._shadow.layout.spans[index]
        return self._ring[index % len(self._ring)][: end - start]

    def land(self, index: int) -> str:
        """Brings it to the host; returns its digest, or an empty string."""
        bucket = self.bucket(index)
        digest = self._digests.bucket(bucket) if self._digests else ""
        self._shadow.bucket(index).copy_(bucket)
        return digest
