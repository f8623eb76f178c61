"""The rollouts in the table of actors."""

from __future__ import annotations

import math
from typing import Any

from penstock.services.rollout.config import (
    VLLM_RANKS,
    NoEngineConfig,
    PluginEngineConfig,
    TorchEngineConfig,
    VllmEngineConfig,
)
from penstock.services.runtime.registry import ActorSpec


def _gpus(config: Any) -> int:
    engine = config.rollout.engine
    if isinstance(engine, VllmEngineConfig):
        return math.prod(engine.vllm.get(name, 1) for name in VLLM_RANKS)
    if isinstance(engine, PluginEngineConfig):
        return 0  # its server has them, or it takes what it sees
    return int(isinstance(engine, TorchEngineConfig) and engine.device != "cpu")


SPEC = ActorSpec(
    kind="rollout",
    make="penstock.services.rollout.service:make",
    count=lambda config: config.rollout.count,
    threads=lambda config: config.rollout.threads,
    preloaded=lambda config: isinstance(config.rollout.engine, TorchEngineConfig | NoEngineConfig),
    gpus=_gpus,
)
