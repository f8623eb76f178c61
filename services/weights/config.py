"""Config section of the weight channel."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from penstock.protocols.connection import is_address
from penstock.protocols.versions import ALIGN
from penstock.services.runtime.settings import MOST_PORT, Section

BUCKET_MB, GPU_BUCKET_MB = 4.0, 64.0
UNDER_WAY = 7
"""Buckets that share a receiver's line, at most: those of a broadcast, and one that is asked for again."""
PATIENCE = 4
"""Times as long as the slowest transfer has taken, the next one may."""


class WeightsConfig(Section):
    """How weights travel from the trainer to the rollouts. See docs/weights.md."""

    transport: Literal["auto", "shm", "gloo", "nccl", "cuda_ipc", "snapshot"] = "auto"
    """``auto`` chooses for each rollout, by where it is: ``nccl`` between GPUs, ``shm`` where both see the same shared
    memory, ``cuda_ipc`` where they do not and share a GPU, else ``gloo``. ``snapshot``: the rollout asks for the
    weights over ZeroMQ, for peers that no collective reaches. A rollout that the named one does not reach gets
    ``snapshot``. With ``cuda_ipc`` the trainer keeps up to three versions more on its GPU."""
    host: str = "127.0.0.1"
    """This host's IPv4 address on the weight network; or that network, e.g. ``10.1.0.0/16``: each host finds
    its own address."""
    snapshot_port: int = Field(0, ge=0, le=MOST_PORT)
    """Port of `host` at which the trainer gives versions to rollouts that ask for them (``snapshot``), e.g. ``5601``,
    for a firewall that has one open; 0: a free one."""
    snapshot_advertise: str | None = None
    """By which address rollouts with ``transport=snapshot`` reach that port, e.g. ``tcp://203.0.113.7:5601``, where the
    trainer's machine is known to them by another than its own, as in most clouds; null: `host`."""
    deadline_s: float = Field(60.0, gt=0)
    """A rollout that has not loaded a version after so many seconds, and those that its bytes may take, is voted out,
    and invited again."""
    least_mb_s: float = Field(50.0, gt=0)
    """What a version's bytes may take: as long as at so many MB/s until a rollout has loaded one, and from then on four
    times as long as the slowest that it has loaded. A rollout that took longer than it may, say behind answers that its
    server had to end, is given that time from then on. Lower it where a large model goes to rollouts behind a slow
    network, e.g. ``5``."""
    stall_s: float = Field(10.0, gt=0)
    """A bucket that has not moved for so many seconds breaks its epoch; what is missing then comes from the
    snapshot."""
    meet_s: float = Field(60.0, gt=0)
    """NCCL may take so many seconds to make a group of the trainer's and the rollouts' GPUs; more where there are many,
    or on several machines, e.g. ``120``."""
    bucket_mb: float | None = Field(None, ge=0.001, le=256)
    """Unit of transfer and of verification, in MiB, e.g. ``8``. null: 4 where the trainer is on a CPU; on GPUs, where
    each bucket costs as much time as many of its bytes, 64, or as many fewer as `least_mb_s` and `stall_s` want: some
    are under way at once."""
    sparse: Literal["auto", "off"] = "auto"
    """``auto``: over networks, 16-bit weights are sent as what changed since the version before, where that is
    smaller. ``off``: whole."""
    full_every: int = Field(50, ge=1)
    """Every so many versions are sent whole."""
    canary_tokens: int = Field(32, ge=0)
    """Length of the sequence that a rollout scores before it serves a version; its log-probabilities must be the
    trainer's. 0: no such check."""
    canary_tolerance: float | None = Field(None, gt=0)
    """Largest mean difference of the canary's log-probabilities, e.g. ``0.05``. null: 1e-3 for float32, 0.1 for 16-bit
    weights, and after eight loads ten times the largest difference that they had, where that is less (``canary.json``
    in the run's folder)."""

    @field_validator("sparse", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return "off" if value is False else value  # as YAML reads a bare off

    @model_validator(mode="after")
    def _can_be_reached(self) -> WeightsConfig:
        told = self.snapshot_advertise
        if told is not None and not is_address(told):
            raise ValueError(f"snapshot_advertise: {told!r} is no address, e.g. tcp://203.0.113.7:5601")
        if told is not None and not self.snapshot_port:
            raise ValueError("snapshot_advertise: it leads to one port: give that, too, e.g. snapshot_port=5601")
        return self

    def bucket_bytes(self, device: str = "cpu") -> int:
        """Of a bucket, which ends where a weight may begin; ``device``: torch's type of what the trainer is on."""
        most = self.least_mb_s * 1e6 / (1 << 20) * self.stall_s / UNDER_WAY
        mb = self.bucket_mb or (max(BUCKET_MB, min(GPU_BUCKET_MB, most)) if device == "cuda" else BUCKET_MB)
        return max(ALIGN, int(mb * (1 << 20)) // ALIGN * ALIGN)

    def patience_s(self, nbytes: int, seen_s: float | None = None) -> float:
        """How long a version of ``nbytes`` may take to be loaded; ``seen_s``: the longest that one has taken lately."""
        transfer = nbytes / (self.least_mb_s * 1e6)
        return self.deadline_s + (transfer if seen_s is None else max(seen_s, min(transfer, PATIENCE * seen_s)))
