"""A version of the weights as bytes: layout, buckets, digests, routes.

The weights lie one after the other in a flat buffer, each starting at a multiple of ``ALIGN`` bytes. The buffer is cut
into buckets of equal size (the last may be shorter), the unit of transfer and of verification. A bucket's digest is
AES-GMAC of its bytes under a key of the run's (`protocols.digests`); the version's is made of the layout's and all
buckets', so it proves the whole.
How a version gets from the trainer to the rollouts is in `protocols.weight_channel`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.protocols.cut import Cut
from penstock.protocols.digests import DIGEST_BYTES, Gmac

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""What weights are published in."""

ALIGN = 64
BUCKET_BYTES = 4 << 20
MAX_BUCKET_BYTES = 256 << 20
"""A bucket must fit a frame of the wire."""


class DigestError(ValueError):
    """Bytes that are not the ones that were promised."""


class Weight(BaseModel):
    """One parameter's place in the flat buffer."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    offset: int = Field(ge=0)
    nbytes: int = Field(ge=0)


class Layout(BaseModel):
    """Which weights a version has, and where they lie; the same for all versions of a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    weights: tuple[Weight, ...]
    nbytes: int = Field(ge=0)
    bucket_bytes: int = Field(BUCKET_BYTES, ge=ALIGN, le=MAX_BUCKET_BYTES, multiple_of=ALIGN)

    @model_validator(mode="after")
    def _inside(self) -> Layout:
        for weight in self.weights:
            if weight.offset % ALIGN or weight.offset + weight.nbytes > self.nbytes:
                raise ValueError(f"{weight.name} lies outside the buffer of {self.nbytes} bytes, or is not aligned")
        return self

    @cached_property
    def names(self) -> frozenset[str]:
        """Of all weights."""
        return frozenset(weight.name for weight in self.weights)

    @cached_property
    def digest(self) -> str:
        """BLAKE2b of the layout itself: by it a proposal names the layout that came with the invitation."""
        lines = [f"{self.nbytes} {self.bucket_bytes}"]
        lines += [f"{weight.name}\0{weight.dtype}\0{weight.shape}\0{weight.offset}" for weight in self.weights]
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=DIGEST_BYTES).hexdigest()

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """The ``(start, end)`` of every bucket, in bytes."""
        return [
            (start, min(start + self.bucket_bytes, self.nbytes)) for start in range(0, self.nbytes, self.bucket_bytes)
        ]


class Digests(BaseModel):
    """How to know that all of a version arrived, in hexadecimal."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    buckets: tuple[str, ...]
    whole: str


class SharedMemoryRoute(BaseModel):
    """The flat buffer lies in a shared-memory segment that trainer and rollout both see."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    type: Literal["shm"] = "shm"
    segment: str


class CollectiveRoute(BaseModel):
    """The buckets are broadcast in a process group of the epoch's own, met through a TCP store: by its rank 0, or each
    part of a bucket by the rank of the trainer that holds it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    type: Literal["gloo", "nccl"]
    store: str
    """``host:port`` of the TCP store."""
    ranks: dict[str, int]
    """Receiver to its rank, or to that of the first of its workers, whose ranks follow each other."""
    size: int = Field(ge=2)
    """Ranks of the group."""
    cut: Cut = Cut()
    """Over the trainer's ranks, which are the first ones of the group."""
    stall_s: float
    """A bucket that has not arrived for this long breaks the epoch."""
    meet_s: float = 60.0
    """How long NCCL may take to make the group, and in its first broadcast its connections."""
    sparse_from: str = ""
    """Digest of the version that buckets may be sent as changes of; empty: all are sent whole."""


class CudaIpcRoute(BaseModel):
    """The flat buffer lies in memory of a GPU that trainer and engine share."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    type: Literal["cuda_ipc"] = "cuda_ipc"
    device: int
    handle: str
    """What CUDA gives another process to map the memory with, in hexadecimal; the fields below belong to it."""
    storage_bytes: int
    storage_offset: int
    counter: str
    counter_offset: int
    event: str
    event_sync: bool


class SnapshotRoute(BaseModel):
    """The receiver asks for the buckets, over ZeroMQ: for peers that nothing faster reaches, and for late ones."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    type: Literal["snapshot"] = "snapshot"


class Share(BaseModel):
    """Workers of one engine on one machine hold a version together, in memory that all of them see: each writes there,
    and proves, every ``count``-th bucket, from the one that is its ``place`` on."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    place: int = Field(ge=0)
    count: int = Field(ge=2)
    buffers: tuple[str, str]
    """Files, filled in turn: while a version is loaded from one of them, the next comes into the other."""
    into: int = Field(ge=0, le=1)
    """Which of them this version comes into."""

    def buckets(self, number: int) -> range:
        """Of ``number`` buckets, this worker's."""
        return range(self.place, number, self.count)


Route = Annotated[SharedMemoryRoute | CollectiveRoute | CudaIpcRoute | SnapshotRoute, Field(discriminator="type")]
Transport = Literal["shm", "gloo", "nccl", "cuda_ipc", "snapshot"]


def lay_out(weights: Iterable[tuple[str, str, tuple[int, ...], int]], bucket_bytes: int = BUCKET_BYTES) -> Layout:
    """Places ``(name, dtype, shape, nbytes)`` one after the other."""
    placed: list[dict[str, object]] = []
    offset = 0
    for name, dtype, shape, nbytes in weights:
        placed.append({"name": name, "dtype": dtype, "shape": shape, "offset": offset, "nbytes": nbytes})
        offset += -(-nbytes // ALIGN) * ALIGN
    return Layout.model_validate({"weights": placed, "nbytes": offset, "bucket_bytes": bucket_bytes})


def digests_of(layout: Layout, buffer: memoryview, gmac: Gmac) -> Digests:
    """The digests of the version that lies in ``buffer`` (bytes)."""
    found = tuple(gmac.bucket(buffer[start:end]) for start, end in layout.spans)
    return Digests(buckets=found, whole=gmac.whole(layout.digest, found))
