"""What sampled tokens tell of a policy's entropy."""

from __future__ import annotations

import pytest
import torch

from penstock.services.trainer.sampled_entropy import sampled_entropy


@pytest.mark.parametrize("seed", range(3))
def test_tokens_of_an_older_policy_tell_the_present_ones_entropy(seed: int) -> None:
    torch.manual_seed(seed)
    older = torch.randn(30).log_softmax(0)
    present = (3 * older).log_softmax(0)  # it has narrowed since
    tokens = torch.multinomial(older.exp(), 200_000, replacement=True)[None]
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, ::3] = False
    found = sampled_entropy(present[tokens].double(), older[tokens].double(), mask)
    entropy = -(present.exp() * present).sum()
    cross = -(older.exp() * present).sum()
    assert cross > 1.5 * entropy
    assert float(found) == pytest.approx(float(entropy), rel=0.03)


def test_one_token_of_another_policy_does_not_decide() -> None:
    log_prob, behaviour = torch.full((1, 100), -1.0), torch.full((1, 100), -1.0)
    behaviour[0, 0] = -30.0
    assert float(sampled_entropy(log_prob, behaviour, torch.ones(1, 100))) == pytest.approx(1.09)
