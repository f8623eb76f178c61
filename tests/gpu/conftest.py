"""Numbers that are printed at the end, to be pasted into docs/gpu.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from penstock.services.runtime.gpus import inventory

_FOUND: list[tuple[str, str]] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        marker = item.get_closest_marker("gpu")
        wanted = marker.args[0] if marker and marker.args else 1
        if marker and there < wanted:
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} CUDA devices, torch sees {there}"))


@pytest.fixture
def note() -> Callable[[str, str], None]:
    return lambda what, value: _FOUND.append((what, value))


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    device = torch.device("cuda", 0)
    torch.cuda.reset_peak_memory_stats(device)
    yield device
    torch.cuda.empty_cache()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _FOUND:
        return
    machine = inventory()
    terminalreporter.section("for docs/gpu.md")
    terminalreporter.line(f"torch {torch.__version__}, driver {machine.driver}, CUDA {machine.cuda}")
    for gpu in machine.gpus:
        terminalreporter.line(f"GPU {gpu.line}")
    for what, value in _FOUND:
        terminalreporter.line(f"| {what} | {value} |")
