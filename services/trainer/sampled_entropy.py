"""What sampled tokens tell of a policy's entropy."""

import torch

LARGEST_RATIO = 10.0


def sampled_entropy(log_prob: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of -r log π over the tokens of ``mask``, nats; all are ``[rows, length]``. r = π / μ, at most
    `LARGEST_RATIO`: what an older policy μ has sampled is weighed by how likely the present one π would sample it.
    Without r it is their cross-entropy, which stays high just where π has collapsed and μ had not."""
    ratio = (log_prob - behaviour).clamp(max=20).exp().clamp(max=LARGEST_RATIO)
    return -(ratio * log_prob * mask).sum() / mask.sum().clamp(min=1)
