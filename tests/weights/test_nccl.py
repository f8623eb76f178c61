"""A group that fails costs nobody but itself: NCCL's C interface, over a library that stalls where it is told to."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import re
import shutil
import subprocess
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog
import torch

from penstock.services.weights import queues
from penstock.services.weights.config import WeightsConfig
from penstock.services.weights.sender import broadcast
from penstock.services.weights.transports import cuda_ipc, nccl
from tests.weights.channel import Channel, Holder, Rollout, until
from tests.weights.test_transports import become, same, weights

SOURCE = Path(__file__).parent / "stub" / "nccl.c"
OK, INIT_BLOCKS, INIT_STALLS, BROADCAST_STALLS, ASYNC_ERROR, ABORT_BLOCKS = range(6)
STALL_S = 1.0
HANDLES = itertools.count(1)


@dataclass
class StubEvent:
    library: ctypes.CDLL
    handle: int
    place: int

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(0.001)

    def query(self) -> bool:
        return bool(self.library.stub_done(ctypes.c_long(self.handle)) >= self.place)


class StubQueue:
    """What the stub runs in order on a thread of its own, as a stream is on a GPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.handle, self._library = next(HANDLES), library

    def after(self, event: object) -> None:
        pass

    def running(self) -> object:
        return contextlib.nullcontext()

    def mark(self) -> StubEvent:
        return StubEvent(self._library, self.handle, self._library.stub_asked(ctypes.c_long(self.handle)))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("stub") / "libnccl.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", path, SOURCE, "-lpthread"], check=True)
    found = ctypes.CDLL(str(path))
    found.penstock_path = str(path)  # type: ignore[attr-defined]
    return found


@pytest.fixture
def channel(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Channel]:
    """A trainer and rollouts that take themselves for ones on GPUs, each on its own; the stub carries their bytes."""
    gpus = itertools.count()
    monkeypatch.setenv(nccl.LIBRARY, library.penstock_path)  # type: ignore[attr-defined]
    monkeypatch.setattr(queues, "make_queue", lambda device: StubQueue(library))
    monkeypatch.setattr(queues, "_spare", defaultdict(list))  # a CPU's own are done before the stub is
    monkeypatch.setattr(nccl, "ABORT_S", 0.5)
    named: dict[int, tuple[torch.device, str]] = {}

    def gpu_of(device: torch.device) -> str:
        return named.setdefault(id(device), (device, f"GPU-{next(gpus)}@here"))[1]

    monkeypatch.setattr(cuda_ipc, "gpu_of", gpu_of)
    library.stub_mode(OK)
    made = Channel(weights(0), stall_s=STALL_S, meet_s=STALL_S, deadline_s=5)
    yield made
    library.stub_mode(OK)
    made.close()


def join(channel: Channel) -> Rollout:
    engine = Holder()
    engine.device = torch.device("cpu")  # an object of its own: by it the fixture gives each a GPU
    return channel.join(engine=engine)


def test_versions_go_over_it(channel: Channel, library: ctypes.CDLL) -> None:
    first, second = join(channel), join(channel)
    for version in range(3):
        become(channel, version)
        channel.publish(version)
        assert same(first.wait(version), version) and same(second.wait(version), version)
        assert first.loaded[version].transport == "nccl"
        channel.settled()
    assert library.stub_broadcasts() > 0 and not library.stub_misused(), "one call after the other"
    assert first.loaded[2].epoch == first.loaded[1].epoch and first.loaded[2].buckets_again == 0


@pytest.mark.parametrize("wrong", [INIT_BLOCKS, INIT_STALLS, BROADCAST_STALLS, ASYNC_ERROR])
def test_the_trainer_lives_and_everybody_gets_the_version(
    channel: Channel, library: ctypes.CDLL, wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = structlog.testing.CapturingLogger()
    monkeypatch.setattr(broadcast, "log", said)
    first, host = join(channel), channel.join(transport="gloo")
    library.stub_mode(wrong)
    started = time.monotonic()
    channel.publish(0)
    assert same(first.wait(0), 0) and same(host.wait(0), 0)
    assert time.monotonic() - started < 4 * STALL_S + 2
    errors = [str(call.kwargs.get("error")) for call in said.calls]
    assert any(first.name in error for error in errors), errors
    assert channel.publisher.error is None
    channel.settled()
    library.stub_mode(OK)
    become(channel, 1)
    channel.publish(1)
    assert same(first.wait(1), 1) and same(host.wait(1), 1)
    assert first.loaded[1].epoch != first.loaded[0].epoch, "a group that broke is never used again"


def test_each_thread_works_on_its_own_gpu(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL makes a communicator on its thread's current GPU, which is the first one unless somebody says otherwise."""
    chosen: dict[str, int] = {}
    monkeypatch.setenv(nccl.LIBRARY, library.penstock_path)  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: chosen.update({threading.current_thread().name: index}))
    device, queue = torch.device("cuda", 3), StubQueue(library)
    lane = nccl.NcclLane(lambda make: make(), 0, 1, device, queue, time.monotonic() + 5)  # type: ignore[arg-type]
    lane.abort()
    assert chosen == {"nccl-0": 3, "nccl-abort": 3}


def test_groups_that_are_over_are_let_go_of(channel: Channel, library: ctypes.CDLL) -> None:
    before, lanes = library.stub_destroyed(), len(running_lanes())
    for version in range(4):  # with each that joins the epoch is another
        join(channel)
        become(channel, version)
        channel.publish(version)
        assert all(same(rollout.wait(version), version) for rollout in channel.rollouts)
        channel.settled()
    until(lambda: library.stub_destroyed() - before >= 2, 10, "groups of earlier epochs to be let go of")
    until(lambda: len(running_lanes()) - lanes <= 5, 10, "the last group's threads alone to be left")


@pytest.mark.parametrize("wrong", [INIT_STALLS, BROADCAST_STALLS, ASYNC_ERROR])
def test_a_group_that_breaks_gives_its_queue_back(
    channel: Channel, library: ctypes.CDLL, wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch has 32 of them: with one lost a break, broadcasts would soon lie in a queue of FSDP's."""
    made = []
    monkeypatch.setattr(queues, "make_queue", lambda device: made.append(device) or StubQueue(library))
    first, counts = join(channel), []
    for version in range(0, 6, 2):
        for number, mode in ((version, wrong), (version + 1, OK)):
            library.stub_mode(mode)
            become(channel, number)
            channel.publish(number)
            assert same(first.wait(number), number)
            channel.settled()
        counts.append(len(made))
    assert counts[0] == counts[-1], counts


def running_lanes() -> list[str]:
    return [thread.name for thread in threading.enumerate() if re.fullmatch(r"nccl-\d+", thread.name)]


def test_who_does_not_come_is_named(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    said = structlog.testing.CapturingLogger()
    monkeypatch.setattr(broadcast, "log", said)
    first, second = join(channel), join(channel)
    channel.broker.muted.add(second.name)
    channel.publish(0)
    assert same(first.wait(0), 0)
    assert f"not there: rank 2 ({second.name})" in str(said.calls[0].kwargs["error"])


def test_an_abort_that_never_returns_is_left_behind(channel: Channel, library: ctypes.CDLL) -> None:
    first = join(channel)
    library.stub_mode(ABORT_BLOCKS)
    channel.broker.muted.add(first.name)
    started = time.monotonic()
    channel.publish(0)
    assert time.monotonic() - started < 2 * STALL_S + 2
    assert channel.publisher.error is None


def test_two_on_one_gpu_are_not_put_into_one_group(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    first = join(channel)
    monkeypatch.setattr(cuda_ipc, "gpu_of", lambda device: "GPU-9@here")
    second, third = join(channel), join(channel)
    channel.publish(0)
    for rollout in (first, second, third):
        assert same(rollout.wait(0), 0)
    ways = [channel.peer(rollout).transport for rollout in (first, second, third)]
    assert ways.count("nccl") == 2 and ways[2] == "shm", ways


def test_every_wait_for_a_large_model_is_as_long_as_its_bytes_take() -> None:
    config = WeightsConfig()
    assert config.patience_s(10 << 20) == pytest.approx(config.deadline_s, rel=0.01)
    assert config.patience_s(141_000_000_000) > 280, "a seed at 0.5 GB/s"


def test_a_group_that_is_left_behind_keeps_what_it_may_still_write_to(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(nccl.LIBRARY, library.penstock_path)  # type: ignore[attr-defined]
    monkeypatch.setattr(nccl, "ABORT_S", 0.2)
    library.stub_mode(OK)
    device, queue, end = torch.device("cpu"), StubQueue(library), time.monotonic() + 5
    lane = nccl.NcclLane(lambda make: make(), 0, 1, device, queue, end)  # type: ignore[arg-type]
    options = SimpleNamespace(rootRank=0, timeout=timedelta(seconds=5))
    given = []
    for mode in (OK, BROADCAST_STALLS):
        library.stub_mode(mode)
        buffer = torch.zeros(64, dtype=torch.uint8)
        given.append(weakref.ref(buffer))
        work = lane.broadcast([buffer], options)
        if mode == OK:
            until(work.is_completed, 5, "a broadcast to end")
        del buffer
    library.stub_mode(ABORT_BLOCKS)
    lane.abort()
    del lane, work
    gc.collect()
    assert [each() is None for each in given] == [True, False]
    library.stub_mode(OK)
