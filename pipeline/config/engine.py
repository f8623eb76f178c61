"""How a run samples, and whether its engine can."""

from __future__ import annotations

from typing import Any

from penstock.services.rollout.config import HTTP_ENGINES, PluginEngineConfig, TorchEngineConfig, VllmEngineConfig


def check_engine(config: Any) -> None:
    """Raises `ValueError` where ``rollout.engine`` cannot sample from this model as ``rollout.sampling`` says."""
    sampling, engine = config.rollout.sampling, config.rollout.engine
    if isinstance(engine, TorchEngineConfig | VllmEngineConfig):
        if isinstance(engine, TorchEngineConfig) and sampling.n > engine.max_sequences:
            raise ValueError(
                f"rollout.sampling.n={sampling.n} exceeds rollout.engine.max_sequences={engine.max_sequences}"
            )
        if sampling.max_new_tokens >= engine.max_length:
            raise ValueError(
                f"rollout.sampling.max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt in "
                f"rollout.engine.max_length={engine.max_length}"
            )
        if config.weights.canary_tokens > engine.max_length:
            raise ValueError(
                f"weights.canary_tokens={config.weights.canary_tokens} exceeds "
                f"rollout.engine.max_length={engine.max_length}"
            )
    own = isinstance(engine, VllmEngineConfig) and not engine.seeded
    served = isinstance(engine, PluginEngineConfig) and engine.name in HTTP_ENGINES
    if config.run.deterministic and (own or served):
        what = "seeded=false" if own else f"name={engine.name}"
        raise ValueError(
            f"run.deterministic: with rollout.engine.{what} what is sampled follows from more than seed, group and "
            "sample; leave it out, or take rollout.engine.type=torch, or vllm with seeded=true"
        )
    if sampling.routing_replay and not getattr(config.model, "experts", 1):
        raise ValueError("rollout.sampling.routing_replay: there are no experts; set model.experts, e.g. to 4")
    if isinstance(engine, PluginEngineConfig) and engine.name in HTTP_ENGINES:
        _check_server(config, engine)
    if isinstance(engine, VllmEngineConfig) and engine.adapter == "beside":
        lora = config.trainer.lora
        if lora and lora.quantize:
            raise ValueError(
                "rollout.engine.adapter: beside would be beside a model that is not quantized as trainer.lora.quantize "
                "wants it; set it to merged"
            )
        if lora is None or not config.trainer.sends_adapter or lora.variant == "dora" or "lm_head" in lora.targets:
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


def _check_server(config: Any, engine: PluginEngineConfig) -> None:
    """Of an engine over HTTP, which samples as it was started to."""
    sampling = config.rollout.sampling
    for key, wanted, what in (
        ("routing_replay", sampling.routing_replay, "which experts it took"),
        ("candidates", sampling.candidates, "which tokens its sampler kept"),
    ):
        if wanted:
            raise ValueError(
                f"rollout.sampling.{key}: a server over HTTP ({engine.name}) does not say {what}; use "
                "rollout.engine.type=torch or vllm"
            )
    urls = engine.options.get("url")
    servers = len(urls) if isinstance(urls, list) else 1
    if urls and config.rollout.count > servers:
        raise ValueError(
            f"rollout.count={config.rollout.count}: each rollout loads versions into a server of its own, and "
            f"rollout.engine.options.url names {servers}; name as many, e.g. [http://127.0.0.1:8000, "
            "http://127.0.0.1:8001], or use fewer rollouts"
        )
    if engine.name != "openai":
        return
    evaluated = {f"prompts.eval_sampling.{name}": how for name, how in config.prompts.eval_sampling.items()}
    evaluated = evaluated if config.gateway.count else {}  # other evaluations' log-probabilities are read by nobody
    for key, how in {"rollout.sampling": sampling, **evaluated}.items():
        if not engine.options.get("processed") and how.temperature not in (0, 1):
            raise ValueError(
                f"{key}.temperature={how.temperature:g}: the server reports log-probabilities before it; start it with "
                "--logprobs-mode processed_logprobs, say, and set rollout.engine.options.processed=true"
            )
        if engine.options.get("processed") and (how.top_p < 1 or how.top_k or how.min_p):
            raise ValueError(
                f"{key}: a server that reports log-probabilities after temperature (rollout.engine.options.processed) "
                "does so after top_p, top_k and min_p, too, which the trainer would not know of; leave them out"
            )
