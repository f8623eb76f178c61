"""What the weight channel asks of CUDA's memory, with a driver that is none: registered pages, shared buffers."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.services.modeling import pinned
from penstock.services.weights.buffers import HostBuffer
from penstock.services.weights.queues import HostQueue
from penstock.services.weights.sender.gpu_copies import GpuCopies
from penstock.services.weights.transports import cuda_ipc


class Driver:
    """CUDA's registration of host memory."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses, self.registered, self.forgotten = refuses, set(), 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.refuses:
            self.registered.add(address)
        return 2 * self.refuses

    def cudaHostUnregister(self, address: int) -> int:
        self.registered.remove(address)
        return 0

    def library(self, name: str) -> Any:
        def forget() -> int:
            self.forgotten += 1
            return 2

        return SimpleNamespace(cudaGetLastError=forget)


@pytest.fixture(params=[False, True], ids=["registers", "refuses"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(request.param)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(pinned.ctypes, "CDLL", made.library)
    return made


def test_memory_that_is_not_registered_is_none(driver: Driver) -> None:
    """A refusal that nobody looks at is reported by CUDA at the next kernel, whoever's it is."""
    buffer = HostBuffer(4096)
    buffer.pin()
    buffer.pin()
    assert driver.registered == (set() if driver.refuses else {buffer.tensor.data_ptr()})
    assert driver.forgotten == driver.refuses, "it is not tried again, and its error is nobody else's"
    del buffer
    assert not driver.registered, "and what was never registered is not given back"


def test_a_copy_on_the_gpu_is_shared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[int] = []
    monkeypatch.setattr(cuda_ipc, "share", lambda buffer: shared.append(buffer.data_ptr()) or len(shared))
    places: list[str] = []

    class Queue(HostQueue):
        @contextlib.contextmanager
        def running(self) -> Any:
            places.append("in")
            yield
            places.append("out")

    copies = GpuCopies(64, torch.device("cpu"), Queue())
    latest, route = copies.take([])
    for _ in range(5):
        now, other = copies.take([latest.data_ptr()])
        assert now.data_ptr() != latest.data_ptr() and other != route
        latest, route = now, other
    assert len(shared) == 2 and places == ["in", "out"] * 2
