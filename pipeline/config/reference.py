"""Whether the reference can take the policy's own versions."""

from __future__ import annotations

from typing import Any


def check_reference(config: Any) -> None:
    """Raises `ValueError` where it cannot."""
    every, saved = config.reference.refresh_every, config.trainer.checkpoint.every
    if not every:
        if config.reference.mix < 1:
            raise ValueError(
                f"reference.mix={config.reference.mix:g}: nothing is mixed where the reference stays as it is; set "
                "reference.refresh_every, e.g. a multiple of trainer.checkpoint.every, or leave it out"
            )
        return
    key = f"reference.refresh_every={every}"
    if not config.with_reference:
        raise ValueError(f"{key}: this run has no reference; set trainer.algorithm.kl.coefficient, or leave it out")
    if every % saved:
        raise ValueError(f"{key} is no multiple of trainer.checkpoint.every={saved}, where the versions are read")
    if config.trainer.lora is not None:
        raise ValueError(f"{key}: checkpoints of trainer.lora are adapters, which the reference does not read")
    if config.run.deterministic:
        raise ValueError(f"{key}: which groups the new one scores depends on time, which run.deterministic forbids")
