"""Log-probabilities of sampled tokens under a model: shared by the trainer and the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from penstock.services.modeling.packing import Rows

HEAD_ON_HIDDEN = {"llama", "qwen2", "qwen3"}
"""Families whose logits are the output embedding of the base model's hidden state, and nothing more."""

LOGIT_BYTES = 256 << 20
"""Logits are made in chunks of at most this size."""


def logprobs(model: Any, rows: Rows, temperature: float) -> torch.Tensor:
    """Log-probability of every sampled token under ``model`` at ``temperature``: float32
    ``[trajectories, longest - 1]``, 0 where ``rows.mask`` is False. Differentiable."""
    inputs = {"input_ids": rows.tokens, "attention_mask": rows.attention, "position_ids": rows.positions}
    if model.config.model_type in HEAD_ON_HIDDEN:
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
        flat = _chunked(hidden.flatten(0, 1)[rows.source], rows, temperature, model.get_output_embeddings())
    else:
        logits = model(**inputs, use_cache=False).logits
        flat = _pick(logits.flatten(0, 1)[rows.source], rows.target, temperature, rows.candidates)
    padded = torch.zeros(rows.mask.shape, dtype=torch.float32, device=flat.device)
    return padded.masked_scatter(rows.mask, flat)


def shares_prompts(model: Any) -> bool:
    """The model takes positions and a dense attention mask, so that trajectories may share a prompt's row."""
    return model.config.model_type in HEAD_ON_HIDDEN


def _chunked(hidden: torch.Tensor, rows: Rows, temperature: float, head: Any) -> torch.Tensor:
    vocabulary = head.weight.shape[0]
    size = max(1, LOGIT_BYTES // (4 * vocabulary))

    def chunk(part: torch.Tensor, wanted: torch.Tensor, candidates: torch.Tensor | None) -> torch.Tensor:
        return _pick(head(part), wanted, temperature, candidates)

    if len(hidden) <= size:
        return chunk(hidden, rows.target, rows.candidates)
    targets = rows.target.split(size)
    candidates = [None] * len(targets) if rows.candidates is None else rows.candidates.split(size)
    parts = zip(hidden.split(size), targets, candidates, strict=True)
    return torch.cat([checkpoint(chunk, *part, use_reentrant=False) for part in parts])


def _pick(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, candidates: torch.Tensor | None
) -> torch.Tensor:
    logits = logits.float() / (temperature or 1.0)
    total = logits.logsumexp(-1)
    if candidates is not None:
        over_candidates = logits.gather(-1, candidates.clamp(min=0)).masked_fill(candidates < 0, -torch.inf)
        some = (candidates >= 0).any(-1)
        total = torch.where(some, over_candidates.masked_fill(~some[:, None], 0.0).logsumexp(-1), total)
    return logits.gather(-1, targets[:, None]).squeeze(-1) - total
