"""Whether a model can be what its adapter wants."""

from __future__ import annotations

from typing import Any


def check_lora(config: Any) -> None:
    """Raises `ValueError` where it cannot."""
    lora = config.trainer.lora
    if lora and lora.quantize and config.model.dtype == "float16":
        raise ValueError(
            "trainer.lora.quantize: it is for models that are computed with in model.dtype, and with float16 the "
            "trainer computes in float32; set model.dtype to bfloat16 or float32"
        )
