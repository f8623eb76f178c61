"""Ordered queues of several GPUs, played through without one: which orders of work wait for each other in a circle.

A rank has host threads and device queues. A host thread puts operations into queues, one after the other, or waits for
an event. A queue carries out its operations in order; a collective is carried out when it stands at the head of a queue
of every rank that takes part. Host threads are interleaved at random; what a device can do, it does.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Compute:
    """A kernel or a copy."""

    what: str


@dataclass(frozen=True)
class Record:
    """The event happens."""

    event: str


@dataclass(frozen=True)
class Wait:
    """Goes on when the event has happened."""

    event: str


@dataclass(frozen=True)
class Collective:
    """All ranks of ``group`` meet in it; they are told apart by number."""

    group: str
    number: int


Operation = Compute | Record | Wait | Collective


@dataclass(frozen=True)
class Put:
    """A host thread puts an operation into a queue, and goes on."""

    queue: str
    operation: Operation


@dataclass(frozen=True)
class HostWait:
    """A host thread goes on when the event has happened."""

    event: str


Thread = Sequence[Put | HostWait]


class DeadlockError(AssertionError):
    """Nobody can go on; says who stands where."""


def play(ranks: Sequence[Sequence[Thread]], seed: int) -> None:
    """``ranks[r]`` are the host threads of rank r. Events are a rank's own. Raises `DeadlockError`."""
    dice = random.Random(seed)
    threads = [[deque(thread) for thread in rank] for rank in ranks]
    queues: list[dict[str, deque[Operation]]] = [{} for _ in ranks]
    happened: list[set[str]] = [set() for _ in ranks]

    def device_goes_on() -> bool:
        moved = False
        for rank, mine in enumerate(queues):
            for queue in mine.values():
                while queue and not isinstance(queue[0], Collective):
                    head = queue[0]
                    if isinstance(head, Wait) and head.event not in happened[rank]:
                        break
                    if isinstance(head, Record):
                        happened[rank].add(head.event)
                    queue.popleft()
                    moved = True
        waiting = [{q[0] for q in mine.values() if q and isinstance(q[0], Collective)} for mine in queues]
        for meeting in set.intersection(*waiting):
            for mine in queues:
                next(q for q in mine.values() if q and q[0] == meeting).popleft()
            moved = True
        return moved

    while True:
        while device_goes_on():
            pass
        able = [
            (rank, thread)
            for rank, mine in enumerate(threads)
            for thread in mine
            if thread and not (isinstance(thread[0], HostWait) and thread[0].event not in happened[rank])
        ]
        if not able:
            break
        rank, thread = dice.choice(able)
        step = thread.popleft()
        if isinstance(step, Put):
            queues[rank].setdefault(step.queue, deque()).append(step.operation)
    left = [f"rank {r}, queue {n}: {q[0]}" for r, mine in enumerate(queues) for n, q in mine.items() if q]
    left += [f"rank {r}, a thread: {t[0]}" for r, mine in enumerate(threads) for t in mine if t]
    if left:
        raise DeadlockError("; ".join(left))


def training(layers: int, before_update: str | None) -> list[Put | HostWait]:
    """FSDP2's forward, as it orders its work (``_fsdp_param_group``): a layer's all-gather runs on a queue of its own
    behind the default queue, which then waits for it; and the optimizer's step, which the host holds back until the
    event ``before_update``."""
    steps: list[Put | HostWait] = []
    for layer in range(layers):
        steps += [
            Put("default", Record(f"issued {layer}")),
            Put("gather", Wait(f"issued {layer}")),
            Put("gather", Collective("fsdp", layer)),
            Put("gather", Record(f"gathered {layer}")),
            Put("default", Wait(f"gathered {layer}")),
            Put("default", Compute(f"layer {layer}")),
        ]
    if before_update:
        steps.append(HostWait(before_update))
    return [*steps, Put("default", Compute("optimizer step"))]
