"""What runs whose rollouts are on the trainer's devices ask of the rest of the config."""

from __future__ import annotations

from typing import Any

from penstock.services.rollout.config import PluginEngineConfig, VllmEngineConfig


def check_colocated(config: Any) -> None:
    """Raises `ValueError` where rollouts cannot be on the trainer's devices."""
    engine, transport = config.rollout.engine, config.weights.transport
    if isinstance(engine, VllmEngineConfig) and engine.start_s >= config.run.turn_s:
        raise ValueError(
            f"rollout.engine.start_s={engine.start_s:g} must be less than run.turn_s={config.run.turn_s:g}: while an "
            "engine starts it does not give its GPUs up"
        )
    for name, program in config.sleepers.items():
        if "trainer" in config.run.elsewhere:
            raise ValueError(
                f"programs.{name}.sleep: with run.placement=colocated it is on the trainer's devices, of this machine, "
                "and run.elsewhere has the trainer on another; leave sleep and wake out"
            )
        if program.ready_s >= config.run.turn_s:
            raise ValueError(
                f"programs.{name}.ready_s={program.ready_s:g} must be less than run.turn_s={config.run.turn_s:g}: "
                "while it loads, after it has died, it does not give its GPUs up"
            )
    if isinstance(engine, PluginEngineConfig) and engine.over_http:
        raise ValueError(
            f"run.placement=colocated: a server over HTTP ({engine.name}) does not sleep; use "
            "rollout.engine.type=torch or vllm, or run.placement=as_given"
        )
    if transport in ("nccl", "cuda_ipc"):
        raise ValueError(
            f"weights.transport={transport}: with run.placement=colocated versions go by the hosts' memory; use auto"
        )
