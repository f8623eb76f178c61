"""Floating-point operations of a decoder, on paper: what its matrices and its attention need, whoever computes them.

Of a token 2 for each parameter that it meets, and 2 for each number of each key that it sees, and of its value (Kaplan
et al. 2020, arXiv:2001.08361, table 1; Chowdhery et al. 2022, PaLM, arXiv:2204.02311, appendix B, which counts all keys
of a row where this counts those that a causal mask leaves). Norms, embeddings and activations are left out. Imports no
torch.
"""

from __future__ import annotations

from penstock.services.modeling.decoder_shape import Shape


def forward_flops(shape: Shape, tokens: float, predicted: float, pairs: float) -> float:
    """Of a forward pass over so many ``tokens``, of which so many are ``predicted`` (the head is for those alone);
    ``pairs`` of a query and a key that it sees."""
    matrices = 2 * (shape.layers * shape.active * tokens + shape.head * predicted)
    return matrices + 2 * shape.layers * shape.pair_numbers * pairs


def backward_flops(forward: float, frozen: bool) -> float:
    """Of the backward pass behind a forward one: gradients of activations and of matrices. ``frozen`` matrices, below
    an adapter, have none of their own; the adapter's own are left out."""
    return forward if frozen else 2 * forward
