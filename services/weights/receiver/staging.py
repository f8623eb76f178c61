"""A version that has arrived, or is arriving, and does not serve yet."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from penstock.protocols.versions import Layout
from penstock.services.weights.buffers import HostBuffer, MappedBuffer
from penstock.services.weights.layout import view_weights
from penstock.services.weights.receiver.loader import MappedVersion


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

    def release(self) -> None:
        """Nobody computes with it any more."""
        if isinstance(self.buffer, MappedBuffer):
            self.buffer.release()
