"""How a run samples, and whether its engine can."""

from __future__ import annotations

from typing import Any

from penstock.services.rollout.config import PluginEngineConfig, TorchEngineConfig, VllmEngineConfig


def check_engine(config: Any) -> None:
    """Raises `ValueError` where ``rollout.engine`` cannot sample from this model as ``rollout.sampling`` says."""
    sampling, engine = config.rollout.sampling, config.rollout.engine
    if isinstance(engine, TorchEngineConfig | VllmEngineConfig):
        if isinstance(engine, TorchEngineConfig) and sampling.n > engine.max_sequences:
            raise ValueError(
                f"rollout.sampling.n={sampling.n} exceeds rollout.engine.max_sequences={engine.max_sequences}"
            )
        if (sampling.max_new_tokens or 0) >= engine.max_length:
            raise ValueError(
                f"rollout.sampling.max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt in "
                f"rollout.engine.max_length={engine.max_length}"
            )
        if config.weights.canary_tokens > engine.max_length:
            raise ValueError(
                f"weights.canary_tokens={config.weights.canary_tokens} exceeds "
                f"rollout.engine.max_length={engine.max_length}; set it to {engine.max_length} or less"
            )
    if sampling.max_new_tokens is None and engine.max_length is None:
        raise ValueError(
            f"rollout.sampling.max_new_tokens=null: only the engine ({engine.name}) knows how long a sequence may be; "
            "set it, e.g. to 1024"
        )
    if sampling.routing_replay and not getattr(config.model, "experts", 1):
        raise ValueError("rollout.sampling.routing_replay: there are no experts; set model.experts, e.g. to 4")
    if sampling.routing_replay and isinstance(engine, PluginEngineConfig) and engine.over_http:
        raise ValueError(
            f"rollout.sampling.routing_replay: a server over HTTP ({engine.name}) does not say which experts it "
            "took; use rollout.engine.type=torch or vllm"
        )
    if isinstance(engine, VllmEngineConfig) and engine.adapter == "beside":
        lora = config.trainer.lora
        if lora and lora.quantize:
            raise ValueError(
                "rollout.engine.adapter: beside would be beside a model that is not quantized as trainer.lora.quantize "
                "wants it; set it to merged"
            )
        if lora is None or not config.trainer.sends_adapter or lora.variant == "dora" or lora.adapts_head:
            raise ValueError(
                "rollout.engine.adapter: beside wants versions that are an adapter alone, and neither dora's nor "
                "the head's: set trainer.lora.publish=adapter, or rollout.engine.adapter=merged"
            )
    if sampling.candidates and not sampling.training().truncated:
        raise ValueError("rollout.sampling.candidates: without top_p, top_k or min_p there is nothing to record")
    if isinstance(engine, VllmEngineConfig) and sampling.candidates and not sampling.top_k:
        raise ValueError("rollout.sampling.candidates: vLLM needs top_k with it, the number of tokens to look at")
    if (
        isinstance(engine, VllmEngineConfig)
        and sampling.training().truncated
        and not sampling.candidates
        and sampling.temperature != 1
    ):
        raise ValueError(
            "rollout.sampling: vLLM reports no log-probabilities of the untruncated distribution at a temperature "
            f"other than 1 (it is {sampling.temperature:g}); set candidates=true with top_k, e.g. 50, or leave top_p, "
            "top_k and min_p out"
        )
