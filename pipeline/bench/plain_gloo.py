"""Broadcasting bytes as plain gloo does: the limit that `penstock bench weights` holds our broadcast against."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

STALL = timedelta(seconds=120)


def meet(store: dist.TCPStore, name: str, rank: int, world: int) -> Any:
    """A process group on the loopback; all of its members call this."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = STALL
    return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, world, options)


@functools.lru_cache(maxsize=1)
def buffer(nbytes: int) -> torch.Tensor:
    """uint8 ``[bytes]``, kept from turn to turn: what is measured after a gigabyte was freed was slower."""
    return torch.ones(nbytes, dtype=torch.uint8)


def broadcast(group: Any, buffer: torch.Tensor, bucket_bytes: int) -> None:
    """One bucket of ``buffer`` (uint8 ``[bytes]``) after the other, from rank 0."""
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    for bucket in buffer.split(bucket_bytes):
        group.broadcast([bucket], options).wait()
