"""The machine a measurement was made on, in a line."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil


def describe() -> str:
    """Processor, usable cores, memory."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        name = models[0] if models else name
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, Python {platform.python_version()}"
