"""Broadcasting a version's buckets over a process group of its own, beside the trainer's."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from protocols.weights import CollectiveRoute, Manifest, buckets


class CollectiveError(RuntimeError):
    """A broadcast that failed or timed out. Its group is never used again."""


def serve_store(host: str) -> tuple[dist.TCPStore, str]:
    """The meeting point of all epochs, on a free port of ``host``; with its ``host:port``."""
    store = dist.TCPStore(host, 0, world_size=None, is_master=True, wait_for_workers=False)
    return store, f"{host}:{store.port}"


class Group:
    """One epoch of the weight channel: the trainer at rank 0 and a fixed set of receivers."""

    def __init__(self, route: CollectiveRoute, rank: int, host: str, store: dist.TCPStore | None = None) -> None:
        self.route, self.rank = route, rank
        timeout = timedelta(seconds=route.timeout_s)
        self._timeout = timeout
        try:
            if store is None:
                address, _, port = route.store.rpartition(":")
                store = dist.TCPStore(
                    address, int(port), world_size=None, is_master=False, timeout=timeout, wait_for_workers=False
                )
            prefix = dist.PrefixStore(f"epoch-{route.epoch}", store)
            world = len(route.ranks) + 1
            if route.backend == "gloo":
                options = dist.ProcessGroupGloo._Options()
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
                options._timeout = timeout
                self._group = dist.ProcessGroupGloo(prefix, rank, world, options)
            else:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._group = dist.ProcessGroupNCCL(prefix, rank, world, options)
        except RuntimeError as error:
            raise CollectiveError(f"epoch {route.epoch}, rank {rank}: the group did not meet: {error}") from None

    def broadcast(self, manifest: Manifest, buffer: torch.Tensor) -> None:
        """Sends (rank 0) or receives every bucket of ``buffer`` (uint8 ``[bytes]``). Raises `CollectiveError`."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        for index, (start, end) in enumerate(buckets(manifest.nbytes, manifest.bucket_bytes)):
            try:
                self._group.broadcast([buffer[start:end]], options).wait(self._timeout)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                raise CollectiveError(
                    f"epoch {self.route.epoch}, rank {self.rank}: bucket {index} was not broadcast: {reason}"
                ) from None
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)
