"""GPUs: whether torch can use them, whether there are enough, whether what shares one fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from penstock.pipeline.config import Config, ConfigError, TinyModel
from penstock.pipeline.preflight.report import Report
from penstock.pipeline.resources.model_files import read_config
from penstock.pipeline.resources.placement import place
from penstock.pipeline.resources.shares import too_much
from penstock.services.modeling.families import LINEAR, keeps_state
from penstock.services.rollout.config import TorchEngineConfig, VllmEngineConfig
from penstock.services.runtime import registry
from penstock.services.runtime.compiler import lacks_compiler
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.gpus import (
    VISIBLE,
    Gpu,
    chosen_gpus,
    cpu_only_reason,
    nccl_conflict,
    visible_gpus,
    vllm_lacks_gpu,
)

FREE = 0.8
"""A GPU of which less is free is used by somebody."""
KERNELS = [("causal_conv1d", "causal-conv1d"), ("fla", "flash-linear-attention"), ("mamba_ssm", "mamba-ssm")]
"""Modules with kernels for convolutions, linear attention and Mamba, and the packages that they are in."""


def look(config: Config, report: Report) -> None:
    """Adds to ``report`` what is lacking here, and which of a colocated run's GPUs have nothing to do at times."""
    try:
        gpus = visible_gpus()
        reason, chosen = cpu_only_reason(), chosen_gpus()
    except SetupError as error:
        report.here.append(str(error))
        return
    every = _devices(config)
    devices = {key: device for key, device in every.items() if not _elsewhere(config, key)}
    for key, device in every.items():
        if device.startswith("cuda:"):
            report.problems.append(f"{key}: {device}: which GPU a process sees, CUDA_VISIBLE_DEVICES says; use cuda")
        elif device not in ("auto", "cpu", "cuda"):
            report.problems.append(f"{key}: {device!r} is none of auto, cpu, cuda")
        elif key in devices and device.startswith("cuda") and not gpus:
            report.here.append(f"{key}: {device} is asked for, and there is no GPU here; use auto or cpu")
    if "rollout.engine.type" in devices and (lacking := vllm_lacks_gpu()):
        report.here.append(f"rollout.engine.type: {lacking}")
    wanting = [key for key, device in devices.items() if device != "cpu"]
    if reason and wanting:
        report.here.append(f"{wanting[0]}: {reason}; or set it to cpu")
    if gpus and wanting and (conflict := nccl_conflict()):
        report.here.append(f"weights.transport: {conflict}")
    if gpus and config.trainer.device != "cpu" and (slow := _missing_kernels(read_config(config))):
        report.notes.append(
            f"model.path: layers that keep a state are computed by torch's reference code here, many times slower than "
            f"by kernels; to have these, run: pip install {' '.join(slow)}"
        )
        if config.run.deterministic and (sums := [name for name in slow if name != KERNELS[0][1]]):
            report.here.append(
                "run.deterministic: torch's reference code for layers that keep a state sums in no fixed order on a "
                f"GPU, and refuses to; run: pip install {' '.join(sums)}, or set it to false"
            )
    if gpus and (lacks := lacks_compiler()):
        said = f"kernels for GPUs are compiled where they run, and here {lacks}"
        report.notes += [f"{key}: {said}" for key in _compiling(config, devices)]
    if gpus or "trainer" in config.run.elsewhere:
        report.notes += _idle(config)
    if gpus:
        try:
            placed = place(config, gpus)
            report.here += too_much(config, placed, {name: gpu.total_gib for name, gpu in chosen.items()})
            report.notes += _used(placed, chosen)
        except ConfigError as error:
            report.here.append(str(error))


def _idle(config: Config) -> Iterator[str]:
    """GPUs of the trainer's for which a colocated run has no engine, or no reference."""
    ranks = config.trainer.ranks
    if not config.run.colocated or config.trainer.device == "cpu" or isinstance(config.model, TinyModel):
        return
    each = registry.actors(config)["rollout"].gpus(config)
    if 0 < (engines := each * config.rollout.count) < ranks and (most := ranks // each) > config.rollout.count:
        yield (
            f"rollout.count={config.rollout.count}: engines are on {engines} of the trainer's {ranks} GPUs "
            "(run.placement=colocated), and the others generate nothing while it waits for answers; set "
            f"rollout.count={most}"
        )
    alone = config.reference.count == config.reference.gpus == 1
    if config.with_reference and config.reference.device != "cpu" and alone and each < ranks:
        yield (
            f"reference.count=1: one GPU of the trainer's {ranks} has the reference (run.placement=colocated), and "
            "its engine stands still while that reads every answer; a reference for each, reference.count="
            f"{ranks}, shares this, where there is memory for it (penstock plan FILE --gpus {ranks}xH100, say)"
        )


def _compiling(config: Config, devices: Mapping[str, str]) -> list[str]:
    """Keys of what asks Triton for kernels on the GPUs of this machine, of ``devices``."""
    found = ["rollout.engine.type"] if "rollout.engine.type" in devices else []
    learners = {"trainer": config.trainer, "critic": config.critic}
    for name, learner in learners.items():
        if devices.get(f"{name}.device", "cpu") != "cpu" and learner.optimizer.moments == "8bit":
            found.append(f"{name}.optimizer.moments")
    return found


def _used(placed: Mapping[str, str], chosen: Mapping[str, Gpu]) -> list[str]:
    """GPUs of this run on which somebody computes already."""
    mine = dict.fromkeys(name for names in placed.values() for name in names.split(","))
    used = [chosen[name] for name in mine if name in chosen and chosen[name].free_gib < FREE * chosen[name].total_gib]
    return [
        f"somebody uses GPU {gpu.index} ({gpu.free_gib:.0f} of {gpu.total_gib:.0f} GiB free), which this run takes; "
        f"set {VISIBLE} to others"
        for gpu in used
    ]


def _missing_kernels(data: dict[str, Any] | None) -> list[str]:
    """Packages with kernels for layers of the model with a config.json of this ``data``, which transformers would take
    if they were here."""
    text = (data or {}).get("text_config") or data or {}
    kinds = [kind for name in ("layer_types", "layers_block_type") for kind in text.get(name) or ()]
    has_mamba = any("mamba" in word for word in (*kinds, *text))
    if text.get("model_type") in LINEAR:
        wanted = KERNELS[:2]
    elif keeps_state(kinds) if kinds else has_mamba:
        wanted = [KERNELS[0], KERNELS[2]] if has_mamba else KERNELS[:1]
    else:
        wanted = []
    return [package for module, package in wanted if find_spec(module) is None]


def _elsewhere(config: Config, key: str) -> bool:
    """Who has this key joins from another machine."""
    return key.partition(".")[0] in config.run.elsewhere


def _devices(config: Config) -> dict[str, str]:
    """Where each kind of process computes, by the key that says so."""
    devices = {"trainer.device": config.trainer.device}
    if isinstance(config.rollout.engine, TorchEngineConfig):
        devices["rollout.engine.device"] = config.rollout.engine.device
    elif isinstance(config.rollout.engine, VllmEngineConfig):
        devices["rollout.engine.type"] = "auto"
    if config.with_reference:
        devices["reference.device"] = config.reference.device
    if config.with_critic:
        devices["critic.device"] = config.critic.device
    return devices
