"""Token losses to one number: token mean as in Yu et al. 2025, arXiv:2503.14476; fixed length as in Liu et al. 2025,
arXiv:2503.20783."""

from __future__ import annotations

import torch


def agg_loss(
    values: torch.Tensor,
    mask: torch.Tensor,
    mode: str = "token-mean",
    length_scale: float | None = None,
    global_tokens: float | None = None,
    global_sequences: float | None = None,
    sequence_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reduces ``values`` over the tokens where ``mask`` is 1 (both ``[rows, length]``).

    token-mean: masked sum / valid tokens. seq-mean-token-sum: mean of row sums over rows with a valid token.
    seq-mean-token-mean: row means first. seq-mean-token-sum-norm: seq-mean-token-sum / ``length_scale`` (None: the
    number of columns). token-sum: masked sum. ``global_tokens`` and ``global_sequences`` replace the local counts, so
    that the parts of a step add up to the whole whatever the micro-batches; ``sequence_tokens`` ``[rows]`` replaces
    each row's, where rows are parts of sequences.
    """
    valid = mask.to(values.dtype)
    sums = (values * valid).sum(-1)
    if mode == "token-sum":
        return sums.sum()
    if mode == "token-mean":
        tokens = valid.sum() if global_tokens is None else global_tokens
        return sums.sum() / tokens
    own = valid.sum(-1)
    rows, counts = (own > 0).to(values.dtype), own if sequence_tokens is None else sequence_tokens
    sequences = rows.sum() if global_sequences is None else global_sequences
    if mode == "seq-mean-token-mean":
        return (sums / (counts + 1e-8) * rows).sum() / sequences
    if mode == "seq-mean-token-sum":
        return (sums * rows).sum() / sequences
    if mode == "seq-mean-token-sum-norm":
        scale = values.shape[-1] if length_scale is None else length_scale
        return (sums * rows).sum() / sequences / scale
    raise ValueError(f"unknown aggregation {mode!r}")
