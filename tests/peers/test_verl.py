"""Beside verl's own functions, from PyPI, on random numbers in float64: `make test-peers`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.services.critic.value_loss import value_loss
from penstock.services.learning.kl_penalty import kl_penalty
from penstock.services.learning.token_returns import gae, whiten
from penstock.services.trainer.algorithms.advantages.grpo import grpo
from penstock.services.trainer.algorithms.advantages.grpo_passk import grpo_passk
from penstock.services.trainer.algorithms.advantages.opo import opo
from penstock.services.trainer.algorithms.advantages.optimal_token_baseline import optimal_token_baseline
from penstock.services.trainer.algorithms.advantages.reinforce_plus_plus import (
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from penstock.services.trainer.algorithms.advantages.remax import remax
from penstock.services.trainer.algorithms.advantages.rloo import rloo
from penstock.services.trainer.algorithms.agg_loss import agg_loss
from penstock.services.trainer.algorithms.corrections.icepop import icepop
from penstock.services.trainer.algorithms.corrections.truncated import truncated
from penstock.services.trainer.algorithms.losses.cispo import cispo
from penstock.services.trainer.algorithms.losses.clip_cov import clip_cov
from penstock.services.trainer.algorithms.losses.clip_cov import pick as pick_clipped
from penstock.services.trainer.algorithms.losses.dppo import dppo_kl, dppo_tv
from penstock.services.trainer.algorithms.losses.dro import dro
from penstock.services.trainer.algorithms.losses.geo_mean import geo_mean
from penstock.services.trainer.algorithms.losses.gspo import gspo
from penstock.services.trainer.algorithms.losses.kl_cov import kl_cov
from penstock.services.trainer.algorithms.losses.kl_cov import pick as pick_penalized
from penstock.services.trainer.algorithms.losses.ppo_clip import ppo_clip
from penstock.services.trainer.algorithms.losses.reinforce import reinforce
from penstock.services.trainer.algorithms.losses.sapo import sapo

pytestmark = pytest.mark.peers
theirs = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed: make test-peers")
corrections = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")

ROWS, LENGTH = 12, 9
quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
seeds = st.integers(0, 2**31 - 1)
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class Step:
    """Random numbers of a step: masks that end anywhere, groups of one to five, rewards on the last token."""

    def __init__(self, seed: int, spread: float = 0.5) -> None:
        torch.manual_seed(seed)
        lengths = torch.randint(1, LENGTH + 1, (ROWS,))
        self.mask = (torch.arange(LENGTH) < lengths[:, None]).double()
        self.groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 3])
        self.scores = torch.randint(0, 5, (ROWS,)).double() / 2
        self.rewards = torch.zeros(ROWS, LENGTH, dtype=torch.float64)
        self.rewards[torch.arange(ROWS), lengths - 1] = self.scores
        self.old = -2 * torch.rand(ROWS, LENGTH, dtype=torch.float64) - 0.01
        self.new = (self.old + spread * torch.randn(ROWS, LENGTH, dtype=torch.float64)).clamp(max=-0.001)
        self.advantages = torch.randn(ROWS, 1, dtype=torch.float64).expand(ROWS, LENGTH).contiguous()
        self.weights = torch.rand(ROWS, LENGTH, dtype=torch.float64) + 0.5
        self.values = torch.randn(ROWS, LENGTH, dtype=torch.float64)
        self.index = self.groups.numpy()


def same(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found, wanted.double(), rtol=tolerance, atol=tolerance)


def their_gae(step: Step, gamma: float, lam: float) -> list[torch.Tensor]:
    factors = torch.tensor(gamma), torch.tensor(lam)
    found = theirs.compute_gae_advantage_return(step.rewards, step.values, step.mask, *factors)
    return [part * step.mask for part in found]


ADVANTAGES: dict[str, tuple[Callable[[Step], torch.Tensor], Callable[[Step], Any]]] = {
    "grpo": (
        lambda s: grpo(s.scores, s.mask, s.groups),
        lambda s: theirs.compute_grpo_outcome_advantage(s.rewards, s.mask, s.index),
    ),
    "grpo without std": (
        lambda s: grpo(s.scores, s.mask, s.groups, std=False),
        lambda s: theirs.compute_grpo_outcome_advantage(s.rewards, s.mask, s.index, norm_adv_by_std_in_grpo=False),
    ),
    "rloo": (
        lambda s: rloo(s.scores, s.mask, s.groups),
        lambda s: theirs.compute_rloo_outcome_advantage(s.rewards, s.mask, s.index),
    ),
    "opo": (
        lambda s: opo(s.scores, s.mask, s.groups),
        lambda s: theirs.compute_opo_outcome_advantage(s.rewards, s.mask, s.index),
    ),
    "reinforce++ baseline": (
        lambda s: reinforce_plus_plus_baseline(s.scores, s.mask, s.groups),
        lambda s: theirs.compute_reinforce_plus_plus_baseline_outcome_advantage(s.rewards, s.mask, s.index),
    ),
    "reinforce++": (
        lambda s: reinforce_plus_plus(s.rewards, s.mask, s.groups, gamma=0.9),
        lambda s: theirs.compute_reinforce_plus_plus_outcome_advantage(
            s.rewards, s.mask, config=theirs.AlgoConfig(gamma=0.9)
        ),
    ),
    "remax": (
        lambda s: remax(s.rewards, s.mask, s.groups, s.values[:, 0]),
        lambda s: theirs.compute_remax_outcome_advantage(s.rewards, s.values[:, 0], s.mask),
    ),
    "gae": (
        lambda s: whiten(gae(s.rewards, s.values, s.mask, 0.97, 0.9)[0], s.mask),
        lambda s: their_gae(s, 0.97, 0.9),
    ),
    "optimal token baseline": (
        lambda s: optimal_token_baseline(
            s.rewards, s.mask, s.groups, s.old, s.weights / 3, s.weights, zero_tail=True
        ),
        lambda s: theirs.compute_optimal_token_baseline_advantage(
            s.rewards, s.mask, s.index, s.old, s.weights / 3, s.weights
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ADVANTAGES)
@quick
@given(seed=seeds)
def test_an_advantage_is_verls(name: str, seed: int) -> None:
    ours, verl = ADVANTAGES[name]
    step = Step(seed)
    same(ours(step), verl(step)[0])


@quick
@given(seed=seeds)
def test_pass_at_k_is_verls(seed: int) -> None:
    step = Step(seed)
    step.groups = torch.arange(ROWS) // 4  # verl refuses groups of one
    step.scores = step.scores + torch.rand(ROWS) * 1e-3  # and takes any of several that are best
    rewards = step.rewards.where(step.rewards == 0, step.scores[:, None])
    rewards[torch.arange(ROWS), step.mask.sum(-1).long() - 1] = step.scores
    config = theirs.AlgoConfig(norm_adv_by_std_in_grpo=True)
    wanted, _ = theirs.compute_grpo_passk_outcome_advantage(rewards, step.mask, step.groups.numpy(), config=config)
    same(grpo_passk(step.scores, step.mask, step.groups, normalize=True), wanted)


def their_config(**given: Any) -> Any:
    from verl.workers.config import ActorConfig

    policy = {
        name: given.pop(name) for name in list(given) if name.startswith(("dro_", "kl_cov", "clip_cov", "ppo_kl"))
    }
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **given)
    return replace(config, policy_loss=replace(config.policy_loss, **policy))


CLIP = {"clip_low": 0.15, "clip_high": 0.28}
THEIR_CLIP = {"clip_ratio_low": 0.15, "clip_ratio_high": 0.28}
LOSSES: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "vanilla": (ppo_clip, {**CLIP, "dual_clip": 2.5}, {**THEIR_CLIP, "clip_ratio_c": 2.5}),
    "gspo": (gspo, CLIP, THEIR_CLIP),
    "cispo": (cispo, CLIP, THEIR_CLIP),
    "sapo": (sapo, {"tau_pos": 1.3, "tau_neg": 1.6}, {"tau_pos": 1.3, "tau_neg": 1.6}),
    "gpg": (reinforce, {}, {}),
    "geo_mean": (geo_mean, CLIP, THEIR_CLIP),
    "dro": (dro, {"beta": 0.3}, {"dro_beta": 0.3}),
    "dppo_tv": (
        dppo_tv,
        {"threshold_low": 0.05, "threshold_high": 0.1, "ratio_cap": 2.0},
        {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "clip_ratio_c": 2.0},
    ),
    "dppo_kl": (
        dppo_kl,
        {"threshold_low": 0.02, "threshold_high": 0.05, "ratio_cap": 2.0},
        {"clip_ratio_low": 0.02, "clip_ratio_high": 0.05, "clip_ratio_c": 2.0},
    ),
}
OWN_AGGREGATION = {"sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean"}
"""verl has these whatever it is told."""


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", LOSSES)
@quick
@given(seed=seeds, mode=st.sampled_from(MODES))
def test_a_loss_and_its_gradient_are_verls(name: str, weighted: bool, seed: int, mode: str) -> None:
    function, options, their_options = LOSSES[name]
    step, found = Step(seed), []
    weights = step.weights if weighted else None
    for who in ("ours", "verl"):
        log_prob = step.new.clone().requires_grad_()
        if who == "verl":
            loss, _ = theirs.get_policy_loss_fn(name)(
                step.old, log_prob, step.advantages, step.mask, mode, their_config(**their_options), weights
            )
        else:
            losses, _ = function(step.old, log_prob, step.advantages, step.mask, weights, **options)
            loss = agg_loss(losses, step.mask, OWN_AGGREGATION.get(name, mode))
        loss.backward()
        found.append((loss.detach(), log_prob.grad))
    same(found[0][0], found[1][0])
    same(found[0][1], found[1][1])


@quick
@given(seed=seeds)
def test_what_goes_with_covariance_is_treated_as_verl_does(seed: int) -> None:
    step, found = Step(seed, spread=0.1), []
    for who in ("ours", "verl"):
        log_prob = step.new.clone().requires_grad_()
        generator = torch.Generator().manual_seed(0)
        if who == "verl":
            penalized, _ = theirs.compute_policy_loss_kl_cov(
                step.old, log_prob, step.advantages, step.mask, config=their_config(kl_cov_ratio=0.2, ppo_kl_coef=0.7)
            )
            # With a share of 1 verl's choice, else a random one, is all that is in the band.
            config = their_config(**THEIR_CLIP, clip_cov_ratio=1.0, clip_cov_lb=0.05, clip_cov_ub=0.5)
            clipped, _ = theirs.compute_policy_loss_clip_cov(
                step.old, log_prob, step.advantages, step.mask, config=config
            )
        else:
            now = log_prob.detach()
            picked = pick_penalized(step.old, now, step.advantages, step.mask, generator, top_fraction=0.2).double()
            losses, _ = kl_cov(step.old, log_prob, step.advantages, step.mask, None, picked, kl_coef=0.7)
            penalized = agg_loss(losses, step.mask)
            band = {"cov_low": 0.05, "cov_high": 0.5, "drop_fraction": 1.0}
            dropped = pick_clipped(step.old, now, step.advantages, step.mask, generator, **CLIP, **band).double()
            losses, _ = clip_cov(step.old, log_prob, step.advantages, step.mask, None, dropped, **CLIP)
            clipped = agg_loss(losses, step.mask)
        (penalized + 3 * clipped).backward()
        found.append((penalized.detach(), clipped.detach(), log_prob.grad))
    for mine, wanted in zip(*found, strict=True):
        same(mine, wanted)


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
@quick
@given(seed=seeds, straight=st.booleans())
def test_a_divergence_and_its_gradient_are_verls(kind: str, seed: int, straight: bool) -> None:
    step, found = Step(seed), []
    for who in ("ours", "verl"):
        log_prob = step.new.clone().requires_grad_()
        if who == "verl":
            values = theirs.kl_penalty(log_prob, step.old, kind + "+" * straight)
        else:
            values = kl_penalty(log_prob, step.old, kind, "k2" if straight else "own")
        values.sum().backward()
        found.append((values.detach(), log_prob.grad))
    same(found[0][0], found[1][0])
    same(found[0][1], found[1][1])


@pytest.mark.parametrize("level", ["token", "sequence"])
@quick
@given(seed=seeds, normalize=st.booleans())
def test_corrections_are_verls(level: str, seed: int, normalize: bool) -> None:
    from penstock.services.trainer.algorithms.corrections.weights import mean_terms

    step = Step(seed)
    for threshold, (function, options) in {
        2.0: (truncated, {"upper": 2.0}),
        "0.5_5.0": (icepop, {"lower": 0.5, "upper": 5.0}),
    }.items():
        found, _ = function(step.new, step.old, step.mask, level=level, **options)
        if normalize:
            total, count = mean_terms(found, step.mask, level)
            found = found / (total / count)
        wanted, _ = corrections.compute_rollout_correction_weights(
            step.new - step.old, step.mask, level, threshold, rollout_is_batch_normalize=normalize
        )
        same(found * step.mask, wanted * step.mask)


@quick
@given(seed=seeds, mode=st.sampled_from(MODES))
def test_the_value_loss_is_verls(seed: int, mode: str) -> None:
    step, found = Step(seed), []
    returns = step.values + step.weights
    for who in ("ours", "verl"):
        values = (step.values + step.new).clone().requires_grad_()
        if who == "verl":
            loss, _ = theirs.compute_value_loss(values, returns, step.values, step.mask, 0.2, mode)
        else:
            losses, _ = value_loss(values, step.values, returns, 0.2)
            loss = agg_loss(losses, step.mask, mode)
        loss.backward()
        found.append((loss.detach(), values.grad))
    same(found[0][0], found[1][0])
    same(found[0][1], found[1][1])
