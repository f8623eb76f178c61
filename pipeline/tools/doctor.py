"""`penstock doctor`: what this machine has, and what it lacks for which use."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.pipeline.config import ConfigError
from penstock.pipeline.run.redis_server import find_server
from penstock.services.runtime.install import install
from penstock.services.weights.transports.shared_memory import directory

NEEDED = (("torch", "train"), ("transformers", "train"), ("safetensors", "train"))
OPTIONAL = (
    ("datasets", "data", "Hugging Face datasets"),
    ("matplotlib", "report", "plots of report.html"),
    ("reasoning_gym", "reasoning-gym", "reasoning-gym tasks"),
    ("tensorboardX", "tensorboard", "TensorBoard files"),
)


def examine(console: Console) -> bool:
    """Prints a table; returns whether the quickstart can run here."""
    table = Table("", "what", "found", "what to do", box=None)
    fit = True

    def row(ok: bool, needed: bool, what: str, found: str, hint: str = "") -> None:
        nonlocal fit
        fit = fit and (ok or not needed)
        mark = "[green]✓[/]" if ok else "[red]✗[/]" if needed else "[yellow]–[/]"
        table.add_row(mark, what, escape(found), "" if ok else escape(hint))

    cores, memory = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 0.0
    memory = psutil.virtual_memory().total / 2**30
    row(cores >= 2, False, "CPU cores", f"{cores}", "two or more let rollouts and trainer overlap")
    row(memory >= 4, True, "memory", f"{memory:.1f} GiB", "the quickstart needs about 4 GiB")
    row(True, True, "Python", platform.python_version())
    for package, extra in NEEDED:
        row(_has(package), True, package, _version(package), install(extra))
    try:
        server = find_server()
        shown = subprocess.run([server, "--version"], capture_output=True, text=True, timeout=10).stdout
        row(True, True, "Redis server", f"{shown.split('v=')[-1].split()[0]} ({server})")
    except (ConfigError, OSError, IndexError, subprocess.TimeoutExpired) as error:
        row(False, True, "Redis server", "none", f"{error}")
    free = shutil.disk_usage(directory()).free / 2**20
    row(
        free > 64,
        True,
        "shared memory",
        f"{free:,.0f} MiB free in {directory()}",
        "weights by shm need room for four versions",
    )
    found = _gpus()
    row(bool(found), False, "GPUs", found or "none", "everything runs on the CPU; weights.transport: shm or gloo")
    for package, extra, use in OPTIONAL:
        row(_has(package), False, use, _version(package), install(extra))
    console.print(table)
    console.print("ready: penstock run configs/quickstart.yaml" if fit else "not ready: mend the lines marked ✗")
    return fit


def _has(package: str) -> bool:
    return find_spec(package) is not None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "installed" if _has(package) else "not installed"


def _gpus() -> str:
    """Names of the NVIDIA GPUs that the driver shows, without importing torch."""
    tool = shutil.which("nvidia-smi")
    if not tool:
        return ""
    try:
        query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip().replace("\n", "; ")
    except (OSError, subprocess.TimeoutExpired):
        return ""
