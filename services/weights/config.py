"""Config section of the weight channel."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.section import Section


class WeightsConfig(Section):
    """How weights travel from the trainer to the rollouts."""

    transport: Literal["shm", "gloo", "nccl"] = "shm"
    """``shm``: shared memory, for rollouts on the trainer's host. ``gloo``: broadcast between CPUs across hosts.
    ``nccl``: broadcast between GPUs."""
    host: str = "127.0.0.1"
    """This host's address on the weight network (gloo and nccl)."""
    deadline_s: float = Field(60.0, gt=0)
    """A receiver that has not loaded a version after this long is reported, and offered it again."""
    bucket_mb: float = Field(32.0, gt=0)
    """Unit of transfer and of verification."""
