"""What advantages are divided by, and kept within: by the step's deviation, whitened, bounded; λ by length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.services.trainer.algorithm_config import AlgorithmConfig
from penstock.services.trainer.algorithms.advantages.gae import gae
from penstock.services.trainer.algorithms.compose import Algorithm

seeds = st.integers(0, 2**31 - 1)


def a_step(seed: int, rows: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores, mask with holes, groups of four."""
    torch.manual_seed(seed)
    mask = torch.rand(rows, 7) < 0.7
    mask[:, 0] = True
    return torch.randint(0, 4, (rows,)).double() / 3, mask, torch.arange(rows) // 4


def advantages(numbers: tuple[torch.Tensor, torch.Tensor, torch.Tensor], **chosen: Any) -> torch.Tensor:
    return Algorithm(AlgorithmConfig.model_validate(chosen)).advantages(*numbers, {})


@settings(deadline=None)
@given(seeds)
def test_the_steps_deviation_divides_all_alike(seed: int) -> None:
    scores, mask, _ = numbers = a_step(seed)
    found = advantages(numbers, preset="lite_ppo")
    of_groups = scores.view(3, 4)
    wanted = (of_groups - of_groups.mean(1, keepdim=True)).reshape(-1) / (np.std(scores.numpy(), ddof=1) + 1e-6)
    torch.testing.assert_close(found, wanted[:, None] * mask)


def test_a_session_counts_once_in_the_steps_deviation_and_one_answer_alone_has_none() -> None:
    scores, mask, groups = torch.tensor([0.0, 1.0, 1.0]), torch.ones(3, 2, dtype=torch.bool), torch.zeros(3)
    chosen = Algorithm(AlgorithmConfig.model_validate({"preset": "lite_ppo"}))
    found = chosen.advantages(scores, mask, groups, {}, sessions=torch.tensor([0, 1, 1]))
    assert found[:, 0].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5, 0.5**0.5], abs=1e-5)
    alone = chosen.advantages(torch.tensor([0.7]), torch.ones(1, 2, dtype=torch.bool), torch.zeros(1), {})
    assert alone.tolist() == [[pytest.approx(0.7)] * 2]


@settings(deadline=None)
@given(seeds, st.sampled_from(["grpo", "rloo", "opo", "maxrl"]), st.none() | st.floats(0.1, 2))
def test_whitened_they_have_mean_0_and_deviation_1_over_tokens_and_the_bound_comes_last(
    seed: int, kind: str, bound: float | None
) -> None:
    _, mask, _ = numbers = a_step(seed)
    found = advantages(numbers, advantage={"type": kind}, whiten=True)
    assert not found[~mask].any()
    if found.any():
        assert float(found[mask].mean()) == pytest.approx(0, abs=1e-6)
        assert float(found[mask].std()) == pytest.approx(1, abs=1e-3)
    bounded = advantages(numbers, advantage={"type": kind}, whiten=True, advantage_bound=bound)
    torch.testing.assert_close(bounded, found if bound is None else found.clamp(-bound, bound))


@settings(deadline=None)
@given(seeds, st.floats(0.05, 2))
def test_each_rows_lambda_is_that_of_its_length(seed: int, alpha: float) -> None:
    _, mask, groups = a_step(seed)
    rewards, values = torch.randn(12, 7).double() * mask, torch.randn(12, 7).double()
    found = gae(rewards, mask.double(), groups, values, gamma=0.9, lam=0.5, length_alpha=alpha)
    rows = []
    for row in range(12):  # a row alone, with its own number
        places = mask[row].nonzero()[:, 0].tolist()
        lam, running, following = max(0.0, 1 - 1 / (alpha * len(places))), 0.0, 0.0
        estimates = torch.zeros(7, dtype=torch.float64)
        for place in reversed(places):
            running = float(rewards[row, place]) + 0.9 * following - float(values[row, place]) + 0.9 * lam * running
            following = float(values[row, place])
            estimates[place] = running
        rows.append(estimates)
    plain = torch.stack(rows)
    centred = (plain - plain[mask].mean()) * mask
    torch.testing.assert_close(found, centred / plain[mask].std(), atol=1e-6, rtol=1e-6)


def test_vapo_is_what_it_says() -> None:
    config = AlgorithmConfig.model_validate({"preset": "vapo", "imitate": {"above": 0.5}})
    assert config.advantage.options()["length_alpha"] == 0.05 and config.imitate.coefficient == 0.1
    with pytest.raises(ValidationError, match=r"imitate\.type"):
        AlgorithmConfig.model_validate({"preset": "vapo", "imitate": {"type": "x"}})
    assert config.imitate.above == 0.5 and config.loss.model_dump()["clip_high"] == 0.28
