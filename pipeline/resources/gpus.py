"""The GPUs that this machine has, and how many each actor of a run wants."""

from __future__ import annotations

import math
import os
import shutil
import subprocess

from penstock.pipeline.config import Config
from penstock.services.rollout.config import PluginEngineConfig, VllmEngineConfig


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES would call the GPUs that this process may use."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name.strip()]
    tool = shutil.which("nvidia-smi")
    if not tool:
        return []
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [str(index) for index, line in enumerate(listed.splitlines()) if line.startswith("GPU ")]


def gpus_of(config: Config) -> dict[str, int]:
    """GPUs that one process of each kind wants."""
    engine = config.rollout.engine
    if isinstance(engine, VllmEngineConfig):
        wanted = _product(engine, "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    elif isinstance(engine, PluginEngineConfig):
        wanted = 0  # its server has them, or it takes what it sees
    else:
        wanted = int(engine.device != "cpu")
    trainer = config.trainer.ranks * (config.trainer.device != "cpu")
    return {"trainer": trainer, "rollout": wanted, "reference": int(config.reference.device != "cpu")}


def _product(engine: VllmEngineConfig, *names: str) -> int:
    return math.prod(int(engine.vllm.get(name, 1)) for name in names)


def total_gpus(config: Config) -> int:
    """GPUs of the whole run, none of them shared."""
    each = gpus_of(config)
    references = config.reference.count * each["reference"] if config.with_reference else 0
    return each["trainer"] + each["rollout"] * config.rollout.count + references
