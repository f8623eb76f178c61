"""Which way to run a model is the fastest that is right for it."""

from __future__ import annotations

from typing import Any

import structlog
import torch

from penstock.services.modeling.families import is_recurrent
from penstock.services.modeling.load import has_own_code
from penstock.services.rollout.engines.torch import native
from penstock.services.rollout.engines.torch.hosted import HostedModel, UnfitError
from penstock.services.rollout.engines.torch.hybrid import HybridModel
from penstock.services.rollout.engines.torch.recomputed import RecomputedModel

log = structlog.get_logger()

Fitting = native.NativeModel | HostedModel | RecomputedModel


def fitting_model(
    config: Any, slots: int, length: int, dtype: torch.dtype, device: torch.device, head_dtype: str | None
) -> Fitting:
    """The model of transformers' ``config``, for ``slots`` sequences of up to ``length`` tokens. What code that came
    with a model keeps between two tokens, and how, nobody knows."""
    if native.supports(config):
        return native.NativeModel(config, slots, length, dtype, device, head_dtype)
    if has_own_code(config):
        return RecomputedModel(config, slots, length, dtype, device, head_dtype)
    hosted = HybridModel if is_recurrent(config.get_text_config()) else HostedModel
    try:
        return hosted(config, slots, length, dtype, device, head_dtype)
    except UnfitError as error:
        reason = str(error)
    # Not in the handler: the error's traceback keeps the hosted model and its cache in memory.
    log.warning("every token runs its whole sequence, which is slow", model=config.model_type, reason=reason)
    return RecomputedModel(config, slots, length, dtype, device, head_dtype)
