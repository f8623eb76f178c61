"""Where a version lies that has arrived, or is arriving, and does not serve yet."""

from __future__ import annotations

import os
from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property

import torch

from penstock.protocols.digests import Gmac
from penstock.protocols.messages import Propose
from penstock.protocols.versions import Layout, Share, SharedMemoryRoute
from penstock.services.weights.buffers import BufferPool, HostBuffer, MappedBuffer, Mappings
from penstock.services.weights.gpu_digest import GpuGmac
from penstock.services.weights.layout import view_weights
from penstock.services.weights.receiver.loader import MappedVersion
from penstock.services.weights.transports.broadcast_group import AHEAD


@dataclass
class StagingBuffer:
    """The sender's segment itself, a buffer of this process, or one that it has together with others; and what lies in
    it."""

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


class Staging:
    """The memory that one receiver takes versions into. ``shared``: other processes can map its own."""

    def __init__(self, shared: bool) -> None:
        self._mappings, self._own = Mappings(), BufferPool(shared)
        self._common: dict[int, HostBuffer] = {}
        """Had together with others (`Share`), by inode."""

    def open(self, proposal: Propose, layout: Layout, serving: StagingBuffer | None) -> StagingBuffer:
        """A place for what is proposed, beside what is ``serving``. Raises `DigestError` where the sender's segment is
        not to be had."""
        if isinstance(proposal.route, SharedMemoryRoute):
            return StagingBuffer(self._mappings.attach(proposal.route.segment, layout.nbytes), layout)
        if proposal.share:
            return StagingBuffer(self._together(proposal.share, layout.nbytes)[proposal.share.into], layout)
        return self.spare(layout, serving)

    def spare(self, layout: Layout, serving: StagingBuffer | None) -> StagingBuffer:
        """A buffer of this process's own."""
        return StagingBuffer(self._own.take(layout.nbytes, [serving.buffer] if serving else []), layout)

    def register(self, share: Share | None, nbytes: int) -> None:
        """Has the two buffers that versions come into in turn registered with CUDA, which takes long: page by page."""
        if share is None:
            self._own.register(nbytes, 2)
        else:
            for buffer in self._together(share, nbytes):
                buffer.pin()

    def _together(self, share: Share, nbytes: int) -> list[HostBuffer]:
        inodes = [os.stat(path).st_ino for path in share.buffers]  # noqa: PTH116 - a Path would be resolved
        for inode, path in zip(inodes, share.buffers, strict=True):
            if inode not in self._common:
                self._common[inode] = HostBuffer(nbytes, path=path)
        self._common = {inode: self._common[inode] for inode in inodes}
        return list(self._common.values())


class Scraps:
    """Room for a few buckets of others that come by, used in turn, beside the places of this process's ``own``."""

    def __init__(self, shadow: StagingBuffer, own: Container[int]) -> None:
        self._shadow, self._own = shadow, own
        size = min(shadow.layout.bucket_bytes, shadow.layout.nbytes)
        self._ring = [torch.empty(size, dtype=torch.uint8) for _ in range(AHEAD["gloo"] + 1)]

    def bucket(self, index: int) -> torch.Tensor:
        """Where a bucket arrives."""
        if index in self._own:
            return self._shadow.bucket(index)
        start, end = self._shadow.layout.spans[index]
        return self._ring[index % len(self._ring)][: end - start]


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
