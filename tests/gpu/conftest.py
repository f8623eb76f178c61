"""The machine of these tests, and numbers that are printed at the end, to be pasted into docs/gpu.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from penstock.services.runtime.gpus import inventory
from tests.gpu.machine import Machine

_FOUND: list[tuple[str, str]] = []
_WENT: list[bool] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is None:
            continue
        wanted = marker.args[0] if marker.args else 1
        if config.getoption("rehearse"):
            if marker.kwargs.get("cuda_only"):
                item.add_marker(pytest.mark.skip(reason="calls CUDA itself: no rehearsal"))
        elif there < wanted:
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} CUDA devices, torch sees {there}"))


@pytest.fixture
def note() -> Callable[[str, str], None]:
    return lambda what, value: _FOUND.append((what, value))


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Machine:
    _WENT.append(True)
    return Machine(bool(request.config.getoption("rehearse")))


@pytest.fixture
def cuda(machine: Machine) -> Iterator[torch.device]:
    machine.forget_peak()
    yield machine.device
    if machine.device.type == "cuda":
        torch.cuda.empty_cache()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not _WENT and not _FOUND:
        return
    found = inventory()
    terminalreporter.section("for docs/gpu.md")
    if config.getoption("rehearse"):
        terminalreporter.line("A rehearsal on the CPU, gloo in NCCL's place: its numbers say nothing of a GPU.")
    terminalreporter.line(f"torch {torch.__version__}, driver {found.driver or 'none'}, CUDA {found.cuda or 'none'}")
    for gpu in found.gpus:
        terminalreporter.line(f"GPU {gpu.line}")
    for what, value in _FOUND:
        terminalreporter.line(f"| {what} | {value} |")
