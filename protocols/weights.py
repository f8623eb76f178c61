"""A version of the weights as bytes: layout, buckets, digests.

The weights lie one after the other in a flat buffer, each starting at a multiple of ``ALIGN`` bytes. The buffer is cut
into buckets of equal size (the last may be shorter), the unit of transfer and of verification. A bucket's digest is
xxh3-128 of its bytes; the version's digest is xxh3-128 of the layout and all bucket digests, so it proves the whole.

    trainer                       broker                       rollout
      │ Publish(version, manifest) ─▶ durable                     │
      │                               Offer(version, manifest) ──▶ receive into a shadow
      │                                                            verify every bucket
      │                                                            swap between two decoding steps
      │ ◀── ReceiverReport ────────── leases at this version ◀──── Loaded(version, digest)

A receiver that cannot verify a version keeps serving the one it has and answers `LoadFailed`; it is offered again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field

ALIGN = 64
BUCKET_BYTES = 32 << 20


class DigestError(ValueError):
    """Bytes that are not the ones the manifest promised."""


class Weight(BaseModel):
    """One parameter's place in the flat buffer."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    dtype: Literal["float32", "bfloat16", "float16"]
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Manifest(BaseModel):
    """What a version consists of, and how to know that all of it arrived."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    weights: tuple[Weight, ...]
    nbytes: int
    bucket_bytes: int
    bucket_digests: tuple[str, ...]
    digest: str


class SharedMemoryRoute(BaseModel):
    """The flat buffer lies in a shared-memory segment of this host."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    type: Literal["shm"] = "shm"
    segment: str


class CollectiveRoute(BaseModel):
    """The buckets are broadcast by rank 0 of a process group of its own, met through a TCP store."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    type: Literal["collective"] = "collective"
    backend: Literal["gloo", "nccl"]
    store: str
    """``host:port`` of the TCP store."""
    epoch: int
    """Number of this membership of the group; a group that failed is never used again."""
    ranks: dict[str, int]
    """Receiver name to rank; the trainer is rank 0."""
    timeout_s: float


Route = Annotated[SharedMemoryRoute | CollectiveRoute, Field(discriminator="type")]


def layout(weights: Iterable[tuple[str, str, tuple[int, ...], int]]) -> tuple[tuple[Weight, ...], int]:
    """Places ``(name, dtype, shape, nbytes)`` one after the other; returns them with the buffer's size in bytes."""
    placed: list[Weight] = []
    offset = 0
    for name, dtype, shape, nbytes in weights:
        fields = {"name": name, "dtype": dtype, "shape": shape, "offset": offset, "nbytes": nbytes}
        placed.append(Weight.model_validate(fields))
        offset += -(-nbytes // ALIGN) * ALIGN
    return tuple(placed), offset


def buckets(nbytes: int, bucket_bytes: int) -> Iterator[tuple[int, int]]:
    """The ``(start, end)`` of every bucket of a buffer of ``nbytes``."""
    for start in range(0, nbytes, bucket_bytes):
        yield start, min(start + bucket_bytes, nbytes)


def make_manifest(weights: tuple[Weight, ...], buffer: memoryview, bucket_bytes: int = BUCKET_BYTES) -> Manifest:
    """The manifest of the version that lies in ``buffer`` (bytes, `layout`'s size)."""
    digests = tuple(_digest(buffer[start:end]) for start, end in buckets(len(buffer), bucket_bytes))
    return Manifest(
        weights=weights,
        nbytes=len(buffer),
        bucket_bytes=bucket_bytes,
        bucket_digests=digests,
        digest=_whole(weights, digests),
    )


def verify(manifest: Manifest, buffer: memoryview) -> None:
    """Raises `DigestError`, naming the bucket, unless ``buffer`` holds exactly the manifest's version."""
    if len(buffer) != manifest.nbytes:
        raise DigestError(f"{len(buffer)} bytes arrived, the manifest declares {manifest.nbytes}")
    spans = list(buckets(manifest.nbytes, manifest.bucket_bytes))
    if len(spans) != len(manifest.bucket_digests):
        raise DigestError(f"{len(manifest.bucket_digests)} bucket digests for {len(spans)} buckets")
    for index, (start, end) in enumerate(spans):
        found = _digest(buffer[start:end])
        if found != manifest.bucket_digests[index]:
            raise DigestError(
                f"bucket {index} has digest {found}, the manifest declares {manifest.bucket_digests[index]}"
            )
    whole = _whole(manifest.weights, manifest.bucket_digests)
    if whole != manifest.digest:
        raise DigestError(f"the version has digest {whole}, the manifest declares {manifest.digest}")


def _digest(data: memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _whole(weights: tuple[Weight, ...], bucket_digests: tuple[str, ...]) -> str:
    hasher = xxhash.xxh3_128()
    for weight in weights:
        hasher.update(f"{weight.name}\0{weight.dtype}\0{weight.shape}\0{weight.offset}\n".encode())
    hasher.update("".join(bucket_digests).encode())
    return hasher.hexdigest()
