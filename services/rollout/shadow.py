"""Where a version arrives before it serves: the sender's shared-memory segment itself, or one of two buffers of this
process, of which the other one serves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from protocols.weights import Layout
from services.rollout.engines.base import Memory
from services.weights import flat, shm
from services.weights.memory import SharedBuffer, path_of


@dataclass
class Shadow:
    """A flat buffer, uint8 ``[bytes]`` on the host, and what must be let go of once nobody computes with it."""

    tensor: torch.Tensor
    where: Layout
    attached: shm.Attached | None = None
    shared: SharedBuffer | None = None
    """Where the tensor lies, if the engine has other processes that must find it."""

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        """The version's tensors, as they lie in it."""
        return flat.views(self.where, self.tensor)

    @property
    def memory(self) -> Memory | None:
        """For an engine whose weights lie in other processes."""
        if self.attached:
            return Memory(path_of(self.attached.file), shm.HEADER_BYTES, self.where)
        return Memory(self.shared.path, 0, self.where) if self.shared else None

    def release(self) -> None:
        """Nobody computes with it any more."""
        if self.attached:
            self.attached.release()


class Shadows:
    """Those of one rollout. ``remote``: the engine's weights lie in other processes."""

    def __init__(self, remote: bool) -> None:
        self._remote = remote
        self._attachments = shm.Attachments()
        self._own: list[Shadow] = []

    def attach(self, segment: str, where: Layout) -> Shadow:
        """The sender's segment. Raises `DigestError` where there is none of that size."""
        attached = self._attachments.attach(segment, where.nbytes)
        return Shadow(flat.from_memory(attached.memory), where, attached)

    def spare(self, where: Layout, serving: Shadow | None) -> Shadow:
        """A buffer of this process that is not ``serving``."""
        free = [own for own in self._own if own is not serving and own.where.digest == where.digest]
        spare = free[0] if free else self._new(where)
        self._own = [own for own in (spare, serving) if own and not own.attached]
        return spare

    def _new(self, where: Layout) -> Shadow:
        if self._remote:
            shared = SharedBuffer(where.nbytes)
            return Shadow(shared.tensor, where, shared=shared)
        return Shadow(torch.zeros(where.nbytes, dtype=torch.uint8), where)
