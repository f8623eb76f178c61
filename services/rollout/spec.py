"""The rollouts in the table of actors."""

from __future__ import annotations

import math
from typing import Any

from penstock.services.rollout.config import PluginEngineConfig, TorchEngineConfig, VllmEngineConfig
from penstock.services.runtime.registry import ActorSpec


def _gpus(config: Any) -> int:
    engine = config.rollout.engine
    if isinstance(engine, VllmEngineConfig):
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        return math.prod(int(engine.vllm.get(name, 1)) for name in sizes)
    if isinstance(engine, PluginEngineConfig):
        return 0  # its server has them, or it takes what it sees
    return int(engine.device != "cpu")


SPEC = ActorSpec(
    kind="rollout",
    make="penstock.services.rollout.service:make",
    count=lambda config: config.rollout.count,
    threads=lambda config: config.rollout.threads,
    preloaded=lambda config: isinstance(config.rollout.engine, TorchEngineConfig),
    gpus=_gpus,
)
