"""A correction: weights for tokens that an older version sampled. Its arguments: docs/extending.md."""

import torch


def fading(
    train_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, mask: torch.Tensor, width: float = 1.0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The importance weight of each token, which fades where the two policies disagree: times exp(-(d / width)²), d
    being how far apart the log-probabilities are. A token of which they are sure alike keeps its weight; none is cut
    off at an edge."""
    d = (train_log_prob - rollout_log_prob).detach()
    kept = torch.exp(-((d / width) ** 2))
    return d.clamp(-20, 20).exp() * kept, {"kept": kept[mask].mean()}
