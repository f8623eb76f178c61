"""`penstock doctor`: what this machine has, and what it lacks for which use."""

from __future__ import annotations

import platform
import resource
import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from penstock.pipeline.config import ConfigError
from penstock.pipeline.run.redis_server import find_server
from penstock.services.runtime import allowance
from penstock.services.runtime.compiler import lacks_compiler
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.gpus import cpu_only_reason, inventory, nccl_conflict, torch_cuda
from penstock.services.runtime.install import install
from penstock.services.weights.transports.shared_memory import directory

FILES = 4096
NEEDED = (("torch", "train"), ("transformers", "train"), ("safetensors", "train"))
OPTIONAL = (
    ("datasets", "data", "Hugging Face datasets"),
    ("mcp", "mcp", "tools of MCP servers (rollout.environment)"),
    ("peft", "lora", "adapters (trainer.lora)"),
    ("bitsandbytes", "qlora", "adapters of a model in 4 bits (trainer.lora.quantize)"),
    ("reasoning_gym", "reasoning-gym", "reasoning-gym tasks"),
    ("tensorboardX", "tensorboard", "TensorBoard files"),
)


def examine(console: Console) -> bool:
    """Prints a table; returns whether the quickstart can run here."""
    table = Table("", "what", Column("found", overflow="fold"), Column("what to do", overflow="fold"), box=None)
    fit = True

    def row(ok: bool, needed: bool, what: str, found: str, hint: str = "") -> None:
        nonlocal fit
        fit = fit and (ok or not needed)
        mark = "[green]✓[/]" if ok else "[red]✗[/]" if needed else "[yellow]–[/]"
        table.add_row(mark, what, escape(found), "" if ok else escape(hint))

    cores, memory = allowance.cores(), allowance.memory()[0] / 2**30
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
    _examine_gpus(row)
    _examine_limits(row)
    for package, extra, use in OPTIONAL:
        row(_has(package), False, use, _version(package), install(extra))
    console.print(table)
    console.print("ready: penstock run configs/quickstart.yaml" if fit else "not ready: mend the lines marked ✗")
    return fit


def _examine_gpus(row: Callable[..., None]) -> None:
    try:
        found, reason = inventory(), cpu_only_reason()
    except SetupError as error:
        row(False, True, "GPUs", "no answer", str(error))
        return
    shown = "; ".join(gpu.line for gpu in found.gpus)
    row(bool(shown), False, "GPUs", shown or "none", "everything runs on the CPU; weights.transport: shm or gloo")
    if not found.gpus:
        return
    built = torch_cuda()
    runs = f"driver {found.driver}, for CUDA {found.cuda[0]}.{found.cuda[1]} at most; torch is built for "
    row(reason is None, True, "CUDA", runs + (f"CUDA {built}" if built else "the CPU alone"), reason or "")
    lacks = lacks_compiler()
    row(
        lacks is None,
        False,
        "C compiler",
        "lacking" if lacks else "there",
        f"vLLM compiles kernels for GPUs, and here {lacks}",
    )
    conflict = nccl_conflict()
    row(conflict is None, True, "NCCL", "one" if conflict is None else "two", conflict or "")


def _examine_limits(row: Callable[..., None]) -> None:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    row(files < 0 or files >= FILES, False, "open files", f"{files} at once", f"ulimit -n {FILES}")
    if Path("/sys/class/infiniband").is_dir():
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY
        row(locked, False, "locked memory", "no limit" if locked else "limited", "InfiniBand: ulimit -l unlimited")


def _has(package: str) -> bool:
    return find_spec(package) is not None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "installed" if _has(package) else "not installed"
