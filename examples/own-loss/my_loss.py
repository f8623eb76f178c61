"""An advantage and a loss. Their arguments, and what they return: docs/extending.md."""

import torch


def leave_one_out(scores: torch.Tensor, mask: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Each answer's reward, less the mean of its group's others (Ahmadian et al. 2024, arXiv:2402.14740)."""
    _, member = torch.unique(groups, return_inverse=True)
    count = torch.bincount(member).to(scores.dtype)[member]
    total = torch.zeros_like(scores).index_add_(0, member, scores)[member]
    return torch.where(count > 1, scores - (total - scores) / (count - 1).clamp(min=1), 0.0)


def bounded_weight(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    importance_weights: torch.Tensor | None = None,
    upper: float = 2.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The policy gradient, each token weighed by how likely it has become, at most ``upper`` times: unlike a clipped
    ratio, no token loses its gradient (CISPO: MiniMax 2025, arXiv:2506.13585)."""
    ratio = (log_prob - old_log_prob).exp().detach()
    losses = -ratio.clamp(max=upper) * advantages * log_prob
    if importance_weights is not None:
        losses = losses * importance_weights
    bounded = ((ratio > upper) & mask).sum() / mask.sum().clamp(min=1)
    return losses, {"bounded_share": bounded}
