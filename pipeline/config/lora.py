"""Whether models can be what their adapters want."""

from __future__ import annotations

from typing import Any


def check_lora(config: Any) -> None:
    """Raises `ValueError` where one cannot."""
    for name, learner in (("trainer", config.trainer), ("critic", config.critic)):
        for key in ("max_position_embeddings", "rope_parameters") if learner.lora else ():
            if getattr(config.model, key, None):
                raise ValueError(
                    f"model.{key}: not with {name}.lora, since an adapter is loaded into a model that knows nothing of "
                    "it; write the model with it into a folder (config.json), and name that as model.path"
                )
        if learner.lora and learner.lora.quantize and config.model.dtype == "float16":
            raise ValueError(
                f"{name}.lora.quantize: matrices in 4 bits are not multiplied with in float16; set model.dtype to "
                "bfloat16 or float32"
            )
