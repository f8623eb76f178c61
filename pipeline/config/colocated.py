"""What runs whose rollouts are on the trainer's devices ask of the rest of the config."""

from __future__ import annotations

from typing import Any

from penstock.services.rollout.config import PluginEngineConfig, VllmEngineConfig


def _check_calls(config: Any) -> None:
    """Raises `ValueError` where a call of a program that sleeps may take so long that a learner gives up its turn."""
    functions = [(f"reward.functions.{index}", each) for index, each in enumerate(config.reward.functions)]
    most = [(f"{key}.timeout_s", each.call_s) for key, each in functions if each.may_ask]
    for kind, scorer in config.scorers.items():
        name, seconds = scorer.bound
        most += [(f"scorers.{kind}.{name}", seconds)] * scorer.may_ask
    for key, seconds in most:
        if seconds >= config.run.turn_s:
            raise ValueError(
                f"{key}={seconds:g} must be less than run.turn_s={config.run.turn_s:g}: before a program "
                f"({', '.join(config.sleepers)}) is put to sleep, calls that are under way have an answer"
            )


def check_colocated(config: Any) -> None:
    """Raises `ValueError` where rollouts cannot be on the trainer's devices."""
    engine, transport = config.rollout.engine, config.weights.transport
    if isinstance(engine, VllmEngineConfig) and engine.start_s >= config.run.turn_s:
        raise ValueError(
            f"rollout.engine.start_s={engine.start_s:g} must be less than run.turn_s={config.run.turn_s:g}: while an "
            "engine starts it does not give its GPUs up"
        )
    if config.sleepers:
        _check_calls(config)
    for name, program in config.sleepers.items():
        if "trainer" in config.run.elsewhere:
            raise ValueError(
                f"programs.{name}.sleep: with run.placement=colocated it is on the trainer's devices, of this machine, "
                "and run.elsewhere has the trainer on another, as penstock launch has; leave sleep and wake out"
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
