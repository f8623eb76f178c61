"""Loading models and computing log-probabilities with them: shared by the trainer and the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from protocols.experience import Trajectory
from services.section import SetupError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

HEAD_ON_HIDDEN = {"llama", "qwen2", "qwen3"}
"""Families whose logits are the output embedding of the base model's hidden state, and nothing more."""

LOGIT_BYTES = 256 << 20
"""Logits are made in chunks of at most this size."""


class ModelError(SetupError):
    """A model that cannot be loaded; says which and what to do."""


def device_of(name: str) -> torch.device:
    """``auto`` is CUDA where there is one."""
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


@dataclass(frozen=True)
class Rows:
    """Some trajectories as one right-padded batch; ``index[r]`` is row r's place in the list they came from."""

    index: tuple[int, ...]
    tokens: torch.Tensor
    """int64 ``[rows, length]``"""
    mask: torch.Tensor
    """bool ``[rows, length - 1]``: position t is True where token t + 1 was sampled."""
    attention: torch.Tensor
    """int64 ``[rows, length]``: 1 for real tokens."""

    def column(self, arrays: Sequence[np.ndarray]) -> torch.Tensor:
        """Per-token ``arrays`` (one ``[tokens]`` for each trajectory of the list) as ``[rows, length - 1]``, aligned
        with `mask`; 0 where padded."""
        rows, length = self.tokens.shape
        padded = np.zeros((rows, length), arrays[self.index[0]].dtype)
        for row, index in enumerate(self.index):
            padded[row, : len(arrays[index])] = arrays[index]
        return torch.from_numpy(padded[:, 1:]).to(self.tokens.device)


def plan_rows(trajectories: Sequence[Trajectory], token_budget: int, device: torch.device) -> Iterator[Rows]:
    """Cuts trajectories into batches of at most ``token_budget`` padded tokens (one longer than that stands alone),
    longest first, so that little is padding."""
    order = sorted(range(len(trajectories)), key=lambda i: (-len(trajectories[i].tokens), i))
    start = 0
    while start < len(order):
        length = len(trajectories[order[start]].tokens)
        rows = max(1, token_budget // length)
        chosen = order[start : start + rows]
        start += rows
        tokens = np.zeros((len(chosen), length), np.int64)
        mask = np.zeros((len(chosen), length), bool)
        attention = np.zeros((len(chosen), length), np.int64)
        for row, index in enumerate(chosen):
            trajectory = trajectories[index]
            size = len(trajectory.tokens)
            tokens[row, :size] = trajectory.tokens
            mask[row, :size] = trajectory.loss_mask == 1
            attention[row, :size] = 1
        yield Rows(
            tuple(chosen),
            torch.from_numpy(tokens).to(device),
            torch.from_numpy(mask[:, 1:].copy()).to(device),
            torch.from_numpy(attention).to(device),
        )


def logprobs(model: Any, rows: Rows, temperature: float) -> torch.Tensor:
    """Log-probability of every sampled token under ``model`` at ``temperature``: float32 ``[rows, length - 1]``, 0
    where ``rows.mask`` is False. Differentiable."""
    targets = rows.tokens[:, 1:][rows.mask]
    if model.config.model_type in HEAD_ON_HIDDEN:
        base = model.base_model
        hidden = base(input_ids=rows.tokens, attention_mask=rows.attention, use_cache=False).last_hidden_state
        picked = hidden[:, :-1][rows.mask]
        head = model.get_output_embeddings()
        flat = _chunked(picked, targets, temperature, head)
    else:
        logits = model(input_ids=rows.tokens, attention_mask=rows.attention, use_cache=False).logits
        flat = _pick(logits[:, :-1][rows.mask], targets, temperature)
    padded = torch.zeros(rows.mask.shape, dtype=torch.float32, device=flat.device)
    return padded.masked_scatter(rows.mask, flat)


def _chunked(hidden: torch.Tensor, targets: torch.Tensor, temperature: float, head: Any) -> torch.Tensor:
    vocabulary = head.weight.shape[0]
    size = max(1, LOGIT_BYTES // (4 * vocabulary))

    def chunk(part: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return _pick(head(part), wanted, temperature)

    if len(hidden) <= size:
        return chunk(hidden, targets)
    parts = zip(hidden.split(size), targets.split(size), strict=True)
    return torch.cat([checkpoint(chunk, part, wanted, use_reentrant=False) for part, wanted in parts])


def _pick(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = logits.float() / (temperature or 1.0)
    return logits.gather(-1, targets[:, None]).squeeze(-1) - logits.logsumexp(-1)


def has_weights(path: str) -> bool:
    """``path`` is a local folder with a model in it."""
    folder = Path(path)
    return folder.is_dir() and any(folder.glob("*.safetensors"))
