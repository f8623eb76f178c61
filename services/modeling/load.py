"""Models and tokenizers of transformers, from a folder or the hub."""

from __future__ import annotations

from typing import Any

import torch

from penstock.services.modeling.dtypes import DTYPES
from penstock.services.runtime.errors import SetupError


class ModelError(SetupError):
    """A model that cannot be loaded; says which and what to do."""


def device_of(name: str) -> torch.device:
    """``auto`` is CUDA where there is one."""
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"device: {name} is asked for, and this machine has no CUDA; use auto or cpu")
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def load_model(path: str, dtype: str, device: torch.device) -> Any:
    """A causal language model of transformers, from a folder or a hub name. Raises `ModelError`."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path: cannot load {path!r}: {error}") from error
    return model.to(device)


def load_tokenizer(path: str) -> Any:
    """The model's tokenizer. Raises `ModelError`."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path: cannot load the tokenizer of {path!r}: {error}") from error
