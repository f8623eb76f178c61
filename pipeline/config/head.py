"""Whether engines compute the head as the trainer does."""

from __future__ import annotations

from typing import Any

from penstock.services.rollout.config import PluginEngineConfig

FLAGS = {"openai": """--hf-overrides '{"head_dtype": "float32"}' (vLLM)""", "sglang": "--enable-fp32-lm-head"}
"""With which servers over HTTP compute it in fp32."""
OPTION = "rollout.engine.options.head_dtype"


def check_head(config: Any) -> None:
    """Raises `ValueError` where the engine is not ours to tell, and it is not said that it does: one side alone is no
    nearer to the other than before."""
    engine, wanted = config.rollout.engine, config.model.head_dtype
    if not isinstance(engine, PluginEngineConfig) or config.model.dtype == "float32":
        return
    told = engine.options.get("head_dtype")
    if wanted and told != wanted:
        how = (
            f"a server over HTTP ({engine.name}) computes logits as it was started: start it with {FLAGS[engine.name]}"
            if engine.over_http
            else f"an engine of your own ({engine.name}) has to compute logits so, too: have it do so"
        )
        raise ValueError(f"model.head_dtype={wanted}: {how}, and say so by {OPTION}={wanted}; or set it to null")
    if engine.over_http and told == "float32" and not wanted:
        raise ValueError(
            f"{OPTION}={told}: the trainer would compute logits in {config.model.dtype}; set model.head_dtype={told} "
            "too, or start the server without it and take the option out"
        )
