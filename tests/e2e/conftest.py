"""What all whole runs share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest


@pytest.fixture(autouse=True)
def nothing_goes_on(tmp_path: Path) -> Iterator[None]:
    """A test that fails in the middle of a run leaves no process to the tests that follow."""
    yield
    for process in psutil.process_iter(["cmdline"]):
        if any(str(tmp_path) in part for part in process.info["cmdline"] or []):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
