"""VESPO, TOPR and M2PO beside their papers' formulas, row by row and token by token."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.services.trainer.algorithms.losses.m2po import m2po, pick
from penstock.services.trainer.algorithms.losses.topr import topr
from penstock.services.trainer.algorithms.losses.vespo import vespo

quick = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**31 - 1)
ROWS, LENGTH = 5, 6


def numbers(seed: int) -> tuple[torch.Tensor, ...]:
    """Old and new log-probabilities, an advantage a row (of both signs, and 0), and a mask with an empty row."""
    torch.manual_seed(seed)
    old = -2 * torch.rand(ROWS, LENGTH, dtype=torch.float64)
    new = (old + 0.4 * torch.randn(ROWS, LENGTH, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(ROWS, 1, dtype=torch.float64)
    advantages[0] = 0
    mask = torch.rand(ROWS, LENGTH) < 0.7
    mask[1] = False
    return old, new, advantages.expand(ROWS, LENGTH), mask


def gradient_of(losses: torch.Tensor, new: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad((losses * mask).sum(), new)[0]


def by_hand(seed: int, weight: Callable[[float, float], float]) -> torch.Tensor:
    """The gradient -A weight(w, A) of each valid token, w being the whole row's ratio."""
    old, new, advantages, mask = numbers(seed)
    found = torch.zeros_like(old)
    for row in range(ROWS):
        valid = [place for place in range(LENGTH) if mask[row, place]]
        ratio = math.prod(math.exp(float((new - old).detach()[row, place])) for place in valid)
        for place in valid:
            advantage = float(advantages[row, place])
            found[row, place] = -advantage * weight(ratio, advantage)
    return found


@quick
@given(seed=seeds)
def test_vespo_weighs_by_the_gamma_kernel_of_the_answers_ratio(seed: int) -> None:
    """φ(w) = w^k exp(λ (1 - w)), with the authors' constants for each sign."""

    def kernel(ratio: float, advantage: float) -> float:
        k, decay = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
        return ratio**k * math.exp(decay * (1 - ratio))

    old, new, advantages, mask = numbers(seed)
    losses, _ = vespo(old, new, advantages, mask)
    torch.testing.assert_close(gradient_of(losses, new, mask), by_hand(seed, kernel))


@quick
@given(seed=seeds, upper=st.sampled_from([0.5, 1.0]))
def test_topr_tapers_what_has_a_negative_advantage_alone(seed: int, upper: float) -> None:
    old, new, advantages, mask = numbers(seed)
    losses, metrics = topr(old, new, advantages, mask, upper=upper)
    wanted = by_hand(seed, lambda ratio, advantage: 1.0 if advantage >= 0 else min(ratio, upper))
    torch.testing.assert_close(gradient_of(losses, new, mask), wanted)
    assert 0 <= float(metrics["tapered_fraction"]) <= 1


def test_an_answer_that_no_policy_would_give_again_is_left_alone() -> None:
    """Ratios beyond what a float holds: nothing overflows, and nothing is learned from what must not be."""
    old, advantages, mask = torch.zeros(2, 40), torch.tensor([[1.0], [-1.0]]).expand(2, 40), torch.ones(2, 40)
    for step in (-30.0, 30.0):
        new = torch.full((2, 40), step, requires_grad=True)
        found = gradient_of(vespo(old, new, advantages, mask)[0], new, mask)
        assert found.isfinite().all() and found.abs().max() < 1e-12
        good, bad = gradient_of(topr(old, new, advantages, mask)[0], new, mask)
        assert (good == -1).all() and torch.allclose(bad, torch.full((40,), math.exp(-20.0) if step < 0 else 1.0))


@quick
@given(seed=seeds, limit=st.sampled_from([0.005, 0.04, 0.16, 10.0]))
def test_m2po_drops_the_furthest_that_went_their_way_one_by_one_until_the_rest_is_near_enough(
    seed: int, limit: float
) -> None:
    old, new, advantages, mask = numbers(seed)
    moved = (new - old).detach()
    squares = {
        (row, place): float(moved[row, place]) ** 2
        for row in range(ROWS)
        for place in range(LENGTH)
        if mask[row, place] and float(moved[row, place] * advantages[row, place]) > 0
    }
    dropped = set()
    while squares and sum(squares.values()) / len(squares) > limit:
        furthest = max(squares, key=squares.__getitem__)
        del squares[furthest]
        dropped.add(furthest)
    found = pick(old, new.detach(), advantages, mask, torch.Generator(), limit)
    assert {(int(row), int(place)) for row, place in found.nonzero()} == dropped
    losses, metrics = m2po(old, new, advantages, mask, None, found.double())
    ratio = (new - old).detach().exp()
    torch.testing.assert_close(gradient_of(losses, new, mask), -advantages * ratio * (mask & ~found))
    assert float(metrics["dropped_fraction"]) == pytest.approx(len(dropped) / int(mask.sum()), abs=1e-6)
