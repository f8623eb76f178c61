"""Whether a model can be what its adapter wants."""

from __future__ import annotations

from typing import Any


def check_lora(config: Any) -> None:
    """Raises `ValueError` where it cannot."""
    lora = config.trainer.lora
    if lora and lora.quantize and config.model.dtype == "float16":
        raise ValueError(
            "trainer.lora.quantize: a trainer computes in float32 where model.dtype=float16, and would round other "
            "matrices than a reference; set model.dtype to bfloat16 or float32"
        )
