"""Whether models can be what their adapters want."""

from __future__ import annotations

from typing import Any


def check_lora(config: Any) -> None:
    """Raises `ValueError` where one cannot."""
    for name, learner in (("trainer", config.trainer), ("critic", config.critic)):
        if learner.lora and learner.lora.quantize and config.model.dtype == "float16":
            raise ValueError(
                f"{name}.lora.quantize: it is for models that are computed with in model.dtype, and with float16 the "
                f"{name} computes in float32; set model.dtype to bfloat16 or float32"
            )
