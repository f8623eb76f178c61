"""The unbiased estimate of the divergence: its mean, and its mean gradient, are those of the divergence itself."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.services.learning.kl_penalty import kl_penalty


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_the_unbiased_estimate_has_the_divergences_value_and_gradient(seed: int) -> None:
    """By counting all outcomes of a policy that another one samples from."""
    torch.manual_seed(seed)
    logits = (2 * torch.randn(6, dtype=torch.float64)).requires_grad_()  # also where k3 of a token is beyond 10
    policy = logits.log_softmax(-1)
    reference, behaviour = ((2 * torch.randn(6, dtype=torch.float64)).log_softmax(-1) for _ in range(2))
    divergence = (policy.exp() * (policy - reference)).sum()
    estimate = (behaviour.exp() * kl_penalty(policy, reference, "k3", "unbiased", behaviour)).sum()
    torch.testing.assert_close(estimate, divergence)
    found, wanted = (torch.autograd.grad(of, logits, retain_graph=True)[0] for of in (estimate, divergence))
    torch.testing.assert_close(found, wanted)
