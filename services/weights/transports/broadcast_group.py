"""Broadcasting a version's buckets over a process group of the epoch's own, beside the trainer's."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from penstock.protocols.versions import CollectiveRoute, Layout
from penstock.services.weights import delta, queues
from penstock.services.weights.parts import Run, packed, runs_of, unpack
from penstock.services.weights.queues import Event, HostQueue, Queue
from penstock.services.weights.transports.nccl import NcclLane

POLL_S = 0.0003
CPU = torch.device("cpu")
NAME = "name"
"""Where an NCCL group's name is left for its members."""
AHEAD = {"gloo": 6, "nccl": 2}
"""Buckets that a receiver has room ready for: the next ones come in while it hashes one."""
LANES = {"gloo": 3, "nccl": 1}
"""Process groups with connections of their own that buckets take turns on: one carries on while another's ends wait
for each other."""
_WHOLE, _CHANGES = 0, 1


class CollectiveError(RuntimeError):
    """A broadcast that failed or stalled. Its group is never used again."""


def serve_store(host: str) -> tuple[dist.TCPStore, str]:
    """The meeting point of all epochs, on a free port of ``host``; with its ``host:port``."""
    with socket.create_server((host, 0), backlog=128) as bound:  # torch by itself would listen on every interface
        port = bound.getsockname()[1]
        store = dist.TCPStore(
            host, port, world_size=None, is_master=True, wait_for_workers=False, master_listen_fd=bound.detach()
        )
    return store, f"{host}:{port}"


@dataclass(slots=True)
class _Sent:
    index: int
    works: list[Any]
    tensors: list[torch.Tensor]
    """Kept until they are sent."""


class BroadcastGroup:
    """One epoch's process groups: the trainer at rank 0 and a fixed set of receivers."""

    def __init__(
        self,
        route: CollectiveRoute,
        epoch: int,
        rank: int,
        host: str,
        store: dist.TCPStore | None = None,
        device: torch.device = CPU,
    ) -> None:
        """``store`` is rank 0's own; NCCL finds what it sends or receives on ``device``, and has a queue there that no
        other group shares: what stalls in it stands in nobody's way."""
        self.route, self.epoch, self.rank = route, epoch, rank
        stall, patience_s = timedelta(seconds=route.stall_s), route.stall_s
        if route.type == "nccl":
            patience_s = max(route.stall_s, route.meet_s)
        deadline = time.monotonic() + patience_s
        try:
            if store is None:
                address, _, port = route.store.rpartition(":")
                store = dist.TCPStore(
                    address, int(port), world_size=None, is_master=False, timeout=stall, wait_for_workers=False
                )
            self._progress = dist.PrefixStore(f"{route.type}-{epoch}-progress", store)
            self._progress.set(str(rank), "-1")
            self._queue = queues.borrow_queue(device) if route.type == "nccl" else HostQueue()
            self._lanes: list[Any] = []
            for lane in range(LANES[route.type]):
                own = dist.PrefixStore(f"{route.type}-{epoch}-{lane}", store)
                self._lanes.append(_meet(own, route, rank, host, device, self._queue, deadline))
        except RuntimeError as error:
            raise CollectiveError(
                f"epoch {epoch}, rank {rank}: the group did not meet within {patience_s:g} s; members: "
                f"{self._members()}{self._absent()}: {_first_line(error)}"
            ) from None
        self._stall, self._first = stall, timedelta(seconds=patience_s)
        """For a broadcast; and for the first one, in which NCCL makes its connections."""
        self._sent: list[_Sent] = []
        self.bytes_sent = self.bytes_received = 0

    def send(self, index: int, bucket: torch.Tensor, changes: bytes | None = None) -> None:
        """Starts to send bucket ``index`` (uint8 ``[bytes]``), or the ``changes`` that make it. Returns at once."""
        tensors = [bucket]
        if self.route.sparse_from:
            payload = bucket if changes is None else torch.frombuffer(bytearray(changes), dtype=torch.uint8)
            kind = _WHOLE if changes is None else _CHANGES
            tensors = [torch.tensor([kind, payload.numel()]), payload]
        self.bytes_sent += tensors[-1].numel()
        try:
            works = [self._lane(index).broadcast([tensor], self._options()) for tensor in tensors]
        except RuntimeError as error:
            raise self._failure(index, _first_line(error)) from None
        self._sent.append(_Sent(index, works, tensors))

    def exchange(
        self,
        runs: list[list[list[Run]]],
        mine: Callable[[int], torch.Tensor],
        ready: Event,
        sent: Callable[[], None],
    ) -> None:
        """A rank of the trainer: sends its own part of every bucket, which ``mine`` makes (uint8 ``[bytes]``) and
        which is there once ``ready`` has happened, and takes part in the others'. ``sent`` is called after each bucket.
        Raises `CollectiveError`."""
        self._queue.after(ready)
        others: list[torch.Tensor] = []
        last, ahead = 0, AHEAD[self.route.type]
        for number, (index, root, nbytes) in enumerate(_turns(runs)):
            if index != last:
                sent()
                last = index
            if root == self.rank:
                tensor = mine(index)
            else:
                if not others:
                    device = mine(index).device
                    with self._queue.running():  # of its memory: training may still read what it has freed
                        others = [torch.empty(_longest(runs), dtype=torch.uint8, device=device) for _ in range(ahead)]
                tensor = others[number % ahead][:nbytes]
            self.bytes_sent += nbytes
            self._sent.append(_Sent(index, [self._broadcast_part(number, index, root, tensor)], [tensor]))
            self.finish(but=ahead - 1)
        self.finish()
        sent()

    def finish(self, but: int = 0) -> None:
        """Waits until all ``but`` the last few buckets are sent. Raises `CollectiveError`, naming the bucket and the
        members."""
        while len(self._sent) > but:
            bucket = self._sent.pop(0)
            for work in bucket.works:
                self._wait(work, bucket.index)

    def receive(self, layout: Layout, bucket: Callable[[int], torch.Tensor], arrived: Callable[[int], None]) -> None:
        """Receives every bucket into ``bucket`` of its number (uint8 ``[bytes]``), which holds the version that buckets
        are changes of, where the route says so. ``arrived`` is called with each one's number, while `AHEAD` others come
        in: their memory is asked for in their order, and may be used again by then."""
        if self.route.sparse_from:
            self._receive_changes(layout, bucket, arrived)
            return
        if self.route.cut.ranks > 1:
            self._receive_parts(layout, bucket, arrived)
            return
        coming: deque[tuple[int, Any]] = deque()
        numbers = iter(range(len(layout.spans)))
        while True:
            for index in islice(numbers, AHEAD[self.route.type] - len(coming)):
                coming.append((index, self._broadcast(index, bucket(index))))
            if not coming:
                return
            index, work = coming.popleft()
            self._wait(work, index)
            arrived(index)

    def _receive_changes(
        self, layout: Layout, bucket: Callable[[int], torch.Tensor], arrived: Callable[[int], None]
    ) -> None:
        for index, (start, end) in enumerate(layout.spans):
            head, mine = torch.zeros(2, dtype=torch.int64), bucket(index)
            self._wait(self._broadcast(index, head), index)
            kind, nbytes = head.tolist()
            if kind == _WHOLE and nbytes == end - start:
                self._wait(self._broadcast(index, mine), index)
            elif kind == _CHANGES and 0 < nbytes < end - start:
                changes = torch.empty(nbytes, dtype=torch.uint8)
                self._wait(self._broadcast(index, changes), index)
                delta.apply(memoryview(changes.numpy()), _numpy(mine))
            else:
                raise self._failure(index, f"{nbytes} bytes of kind {kind} were announced")
            arrived(index)

    def _receive_parts(
        self, layout: Layout, bucket: Callable[[int], torch.Tensor], arrived: Callable[[int], None]
    ) -> None:
        """Each part of a bucket from the trainer's rank that holds it."""
        runs = runs_of(layout, self.route.cut)
        ahead: deque[tuple[int, int, torch.Tensor, Any]] = deque()
        missing = [sum(1 for one in parts if one) for parts in runs]
        turns = enumerate(_turns(runs))
        open_buckets: dict[int, torch.Tensor] = {}
        while True:
            for number, (index, root, nbytes) in islice(turns, AHEAD[self.route.type] - len(ahead)):
                if index not in open_buckets:
                    open_buckets[index] = _opened(bucket(index), runs[index])
                here, mine = open_buckets[index], runs[index][root]
                in_place = packed(here, mine) if len(mine) == 1 else None
                tensor = torch.empty(nbytes, dtype=torch.uint8, device=here.device) if in_place is None else in_place
                self.bytes_received += nbytes
                if self.route.type == "nccl":  # its memory may be that of a part that is still being unpacked
                    self._queue.after(queues.current_queue(here.device).mark())
                ahead.append((index, root, tensor, self._broadcast_part(number, index, root, tensor)))
            if not ahead:
                return
            index, root, tensor, work = ahead.popleft()
            self._wait(work, index)
            if len(runs[index][root]) > 1:
                unpack(tensor, open_buckets[index], runs[index][root])
            missing[index] -= 1
            if not missing[index]:
                del open_buckets[index]
                arrived(index)

    def _broadcast(self, index: int, tensor: torch.Tensor) -> Any:
        self.bytes_received += tensor.numel() * tensor.element_size()
        return self._broadcast_part(index, index, 0, tensor)

    def _broadcast_part(self, number: int, index: int, root: int, tensor: torch.Tensor) -> Any:
        """``number`` counts broadcasts, for the lanes to take turns."""
        try:
            work = self._lane(number).broadcast([tensor], self._options(root))
        except RuntimeError as error:
            raise self._failure(index, _first_line(error)) from None
        self._first = self._stall
        return work

    def _options(self, root: int = 0) -> dist.BroadcastOptions:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = root, 0, self._first
        return options

    def _lane(self, index: int) -> Any:
        return self._lanes[index % len(self._lanes)]

    def _wait(self, work: Any, index: int) -> None:
        """gloo waits by itself, at most `stall_s`; NCCL is looked after."""
        deadline = time.monotonic() + self.route.stall_s
        try:
            while self.route.type == "nccl" and not work.is_completed():
                if time.monotonic() > deadline:
                    raise self._failure(index, f"it did not move for {self.route.stall_s:g} s")
                time.sleep(POLL_S)
            work.wait()
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise self._failure(index, _first_line(error)) from None

    def close(self) -> None:
        """Lets go of connections in good order; nothing is under way."""
        for lane in self._lanes:
            if isinstance(lane, NcclLane):
                lane.close()

    def abort(self) -> None:
        """Ends it, whatever is under way: what NCCL still has in line is given up."""
        for lane in self._lanes:
            if isinstance(lane, NcclLane):
                lane.abort()

    def _failure(self, index: int, reason: str) -> CollectiveError:
        """A group that failed is ended here."""
        self.abort()
        return CollectiveError(
            f"epoch {self.epoch}, rank {self.rank}: bucket {index} was not broadcast among {self._members()}"
            f"{self._absent()}: {reason}"
        )

    def _absent(self) -> str:
        """Who has not come to the group, as far as can be told."""
        try:
            away = [rank for rank in range(self.route.size) if not self._progress.check([str(rank)])]
        except (RuntimeError, AttributeError):
            return ""
        return f"; not there: {', '.join(f'rank {rank}{self._name(rank)}' for rank in away)}" if away else ""

    def _name(self, rank: int) -> str:
        """The receiver that ``rank`` belongs to."""
        first = max((r for r in self.route.ranks.values() if r <= rank), default=None)
        return next((f" ({identity})" for identity, r in self.route.ranks.items() if r == first), "")

    def _members(self) -> str:
        return ", ".join(f"rank {rank} ({identity})" for identity, rank in self.route.ranks.items())


def _opened(bucket: torch.Tensor, runs: list[list[Run]]) -> torch.Tensor:
    """A bucket that parts come into: where weights are padded nobody sends anything, and another one's bytes may be
    there."""
    sent = sum(run.nbytes for mine in runs for run in mine)
    return bucket if sent == bucket.numel() else bucket.zero_()


def _turns(runs: list[list[list[Run]]]) -> Iterator[tuple[int, int, int]]:
    """Every broadcast in the one order that all members keep: bucket, root, bytes."""
    for index, bucket in enumerate(runs):
        for root, mine in enumerate(bucket):
            if mine:
                yield index, root, sum(run.nbytes for run in mine)


def _longest(runs: list[list[list[Run]]]) -> int:
    return max((nbytes for _, _, nbytes in _turns(runs)), default=0)


def _meet(
    store: dist.PrefixStore, route: CollectiveRoute, rank: int, host: str, device: torch.device, device_queue: Queue,
    deadline: float,
) -> Any:  # fmt: skip
    timeout = timedelta(seconds=max(0.001, deadline - time.monotonic()))
    store.set_timeout(timeout)
    if route.type == "nccl":

        def name(make: Callable[[], bytes]) -> bytes:
            if rank == 0:
                store.set(NAME, make())
            found: bytes = store.get(NAME)
            return found

        return NcclLane(
            name, rank, route.size, device, device_queue, deadline, lambda: queues.give_back(device, device_queue)
        )
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    options._threads = 1  # two would share the same connections: 15 % slower
    return dist.ProcessGroupGloo(store, rank, route.size, options)


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.numpy()


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200]
