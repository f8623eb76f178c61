"""Selective gradient checkpointing: what took matrices or attention to compute is kept, all else is computed again; and
so are the experts of a mixture, whose rows would take most of the memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.attention.varlen  # registers the operation that packed rows take on GPUs
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

KEPT = frozenset(
    getattr(library, name).default
    for library in (torch.ops.aten, torch.ops.torch_attn)
    for name in (
        "mm", "addmm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_flash_attention_forward", "_efficient_attention_forward", "_varlen_attn",
    )
    if hasattr(library, name)
)  # fmt: skip


def _choose(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def keep_products() -> Any:
    """`torch.utils.checkpoint.checkpoint`'s ``context_fn``."""
    return create_selective_checkpoint_contexts(_choose)
