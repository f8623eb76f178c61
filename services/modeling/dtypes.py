"""The dtypes that weights are published and computed in."""

import torch

from penstock.protocols.versions import DTYPE_BYTES

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
"""By the names that configs and layouts use."""
HALVES = {name: DTYPES[name] for name in ("bfloat16", "float16")}
"""What a learner casts its fp32 weights to as it computes with them."""
