"""No collective of the weight channel can wait on one of FSDP's, or the other way round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from penstock.protocols.cut import Cut
from penstock.protocols.digests import Gmac
from penstock.services.weights.layout import make_layout
from penstock.services.weights.parts import Piece, pieces_of, runs_of
from penstock.services.weights.sender.device_stage import DeviceStage
from penstock.services.weights.transports.broadcast_group import _turns
from tests.weights.queue_simulator import (
    Collective,
    Compute,
    DeadlockError,
    HostWait,
    Put,
    Record,
    Thread,
    Wait,
    play,
    training,
)

LAYERS, BUCKETS, SCHEDULES = 4, 3, 300


def as_it_was(rank: int) -> Thread:
    """Publishing at commit dc6396b, on the queue of training: rank 1 casts there and sends, rank 0's wait for what it
    receives stands in the way of whatever training puts there next."""
    steps: list[Put | HostWait] = []
    for bucket in range(BUCKETS):
        if rank:
            steps += [Put("default", Compute("cast")), Put("default", Record(f"cast {bucket}"))]
            steps += [Put("p2p", Wait(f"cast {bucket}")), Put("p2p", Collective("publish", bucket))]
        else:
            steps += [Put("default", Record(f"posted {bucket}")), Put("p2p", Wait(f"posted {bucket}"))]
            steps += [Put("p2p", Collective("publish", bucket)), Put("p2p", Record(f"came {bucket}"))]
            steps += [Put("default", Wait(f"came {bucket}"))]
    return [*steps, Put("default", Record("read"))]


def test_the_order_as_it_was_ends_in_a_circle() -> None:
    circles = []
    for seed in range(SCHEDULES):
        try:
            play([[training(LAYERS, "read"), as_it_was(rank)] for rank in range(2)], seed)
        except DeadlockError as error:
            circles.append(str(error))
    assert circles
    assert any("Collective(group='fsdp'" in said and "Collective(group='publish'" in said for said in circles)


class RecordingQueue:
    """Notes what the real code puts into its queue, and carries it out on the CPU."""

    handle = 0

    def __init__(self) -> None:
        self.steps: list[Put | HostWait] = []
        self._events = 0

    def after(self, event: RecordedEvent) -> None:
        self.steps.append(Put("publish", Wait(event.name)))

    def mark(self) -> RecordedEvent:
        self._events += 1
        self.steps.append(Put("publish", Record(f"mark {self._events}")))
        return RecordedEvent(f"mark {self._events}", self)

    @contextmanager
    def running(self) -> Iterator[None]:
        self.steps.append(Put("publish", Compute("torch")))
        yield


class RecordedEvent:
    def __init__(self, name: str, queue: RecordingQueue | None = None) -> None:
        self.name, self._queue = name, queue

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        assert self._queue
        self._queue.steps.append(HostWait(self.name))


def as_it_is(rank: int, ranks: int) -> tuple[list[Put | HostWait], str]:
    """What `DeviceStage` and a broadcast put into the publish's queue, and the event that training's host waits for."""
    layout = make_layout({"a": (9, 8), "b": (5, 8), "c": (30,)}, "bfloat16", 128)
    runs, pieces, queue = (
        runs_of(layout, Cut(shards=ranks)),
        pieces_of(layout, rank, Cut(shards=ranks)),
        RecordingQueue(),
    )
    stage = DeviceStage(
        layout, pieces, [bucket[rank] for bucket in runs], torch.device("cpu"), queue, Gmac.of_run("test")
    )

    def put(piece: Piece, target: torch.Tensor, at: int) -> None:
        target[at : at + piece.nbytes] = 1

    ready = stage.read(put, RecordedEvent("trained"))
    assert isinstance(ready, RecordedEvent)
    assert int(stage.bytes.sum()) == sum(piece.nbytes for bucket in pieces for piece in bucket), "every byte, once"
    read = next(step.event for step in reversed(queue.steps) if isinstance(step, HostWait))
    queue.steps.append(Put("broadcast", Wait(ready.name)))  # as `BroadcastGroup.exchange`, in the group's own queue
    for number, _ in enumerate(_turns(runs)):
        queue.steps.append(Put("broadcast", Collective("publish", number)))
    stage.copy_to(torch.zeros(layout.nbytes, dtype=torch.uint8)).synchronize()
    return queue.steps, read


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_order_as_it_is_never_does(ranks: int) -> None:
    found = [as_it_is(rank, ranks) for rank in range(ranks)]
    for seed in range(SCHEDULES):
        play([[[Put("default", Record("trained")), *training(LAYERS, read)], steps] for steps, read in found], seed)


def test_a_publish_that_stalls_holds_up_no_step() -> None:
    """A receiver that never comes: the broadcast stays at the head of its queue, training goes on to its end."""
    steps, read = as_it_is(0, 1)
    with pytest.raises(DeadlockError) as stands:
        alone = [[Put("default", Record("trained")), *training(LAYERS, read)], steps]
        receiver = [[Put("gather", Collective("fsdp", layer)) for layer in range(LAYERS)]]
        play([alone, receiver], 0)
    assert "queue broadcast: Collective(group='publish'" in str(stands.value)
    others = ("queue default", "queue gather", "queue publish", "a thread")
    assert not any(other in str(stands.value) for other in others), "only the broadcast stands"
