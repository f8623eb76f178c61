"""The GPUs that this machine has, and how many each actor of a run wants."""

from __future__ import annotations

import os
import shutil
import subprocess

from penstock.pipeline.config import Config
from penstock.services.runtime import registry


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


def total_gpus(config: Config) -> int:
    """GPUs of the whole run, none of them shared."""
    return sum(len(spec.names(config)) * spec.gpus(config) for spec in registry.actors(config).values())
