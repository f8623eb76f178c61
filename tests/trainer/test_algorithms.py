"""What holds of every built-in advantage, loss and correction, whatever the numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.pipeline.tools.algorithms import choices
from penstock.services.trainer.algorithm_config import AlgorithmConfig
from penstock.services.trainer.algorithms.advantages.gpg import gpg
from penstock.services.trainer.algorithms.compose import Algorithm, Part
from penstock.services.trainer.algorithms.losses.ppo_clip import ppo_clip
from penstock.services.trainer.algorithms.totals import Totals
from penstock.services.trainer.presets import PRESETS, contradicted

NEEDS: dict[str, dict[str, Any]] = {"gdpo": {"components": {"reward/a": 1.0, "reward/b": 0.5}}}
ADVANTAGES, LOSSES, CORRECTIONS = (
    [kind.model_fields["type"].default for kind in kinds] for kinds in choices().values()
)
CENTRED = ["grpo", "rloo", "gpg", "maxrl", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
"""Their advantages sum to zero: over each group's rows, or, of those that are whitened, over the step's tokens."""
LENGTH = 7
quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
seeds = st.integers(0, 2**31 - 1)


def algorithm(**chosen: Any) -> Algorithm:
    for key in ("advantage", "loss", "correction"):
        if key in chosen:
            chosen[key] = {"type": chosen[key], **NEEDS.get(chosen[key], {})}
    if chosen.get("advantage") == {"type": "none"}:
        chosen["imitate"] = {"coefficient": 1.0}
    return Algorithm(AlgorithmConfig.model_validate({"ratio": "proximal", **chosen}))


def a_step(seed: int, rows: int = 12, length: int = LENGTH) -> tuple[torch.Tensor, ...]:
    """Scores, mask with holes, groups of four, log-probabilities of trainer and engine, advantages of each row."""
    torch.manual_seed(seed)
    mask = torch.rand(rows, length) < 0.7
    mask[:, 0] = True
    groups = torch.arange(rows) // 4
    scores = torch.randint(0, 4, (rows,)).double() / 3
    log_prob = -2 * torch.rand(rows, length, dtype=torch.float64)
    behaviour = log_prob + 0.3 * torch.randn(rows, length, dtype=torch.float64)
    return scores, mask, groups, log_prob, behaviour, torch.randn(rows, 1, dtype=torch.float64).expand(rows, length)


def columns(scores: torch.Tensor) -> dict[str, torch.Tensor]:
    values = scores[:, None] * torch.arange(LENGTH + 3) / LENGTH  # of any width: what is beyond the mask is left out
    return {
        "reward/a": scores,
        "reward/b": 1 - scores * scores,
        "values": values,
        "process": values / 3 - 0.1,
        "greedy": scores / 2,
        "baseline": scores / 3,
        "reference": values - 1,
        "sampled": values / 2 - 1,
        "policy": values / 3 - 1,
        "squares": values / 4,
        "states": (3 * scores).long()[:, None].expand(values.shape),
        "taught": values / 2 - 2,
        "weights": 1 + values / 5,
    }


def loss_and_gradient(chosen: Algorithm, rows: list[int], numbers: tuple[torch.Tensor, ...]) -> tuple[float, Any]:
    _, mask, _, log_prob, behaviour, advantages = numbers
    leaf = log_prob[rows].clone().requires_grad_()
    picked = chosen.pick(log_prob, behaviour, advantages, mask, 0) if chosen.picks else mask
    part = Part(leaf, behaviour[rows], advantages[rows], mask[rows], {"picked": picked[rows].double()})
    loss, _ = chosen.loss(part, Totals(float(mask.sum()), float(len(mask))))
    loss.backward()
    return float(loss.detach()), leaf.grad


@pytest.mark.parametrize("name", ADVANTAGES)
@quick
@given(seed=seeds)
def test_an_advantage_does_not_depend_on_order_or_padding(name: str, seed: int) -> None:
    chosen = algorithm(advantage=name)
    scores, mask, groups, *_ = a_step(seed)
    given, width = columns(scores), mask.shape[1]
    found = chosen.advantages(scores, mask, groups, {n: v[:, :width] if v.ndim > 1 else v for n, v in given.items()})
    assert found.shape == mask.shape and not found[~mask].any()
    order = torch.randperm(len(scores))
    wide = torch.cat([mask, torch.zeros(len(mask), 3, dtype=torch.bool)], 1)[order]
    again = chosen.advantages(scores[order], wide, groups[order], columns(scores[order]))
    torch.testing.assert_close(again[:, :width], found[order])


@pytest.mark.parametrize("name", CENTRED)
@quick
@given(seed=seeds)
def test_advantages_sum_to_zero(name: str, seed: int) -> None:
    scores, mask, groups, *_ = a_step(seed)
    found = algorithm(advantage=name).advantages(scores, mask, groups, columns(scores))
    if name in ("gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        assert float(found.sum()) == pytest.approx(0, abs=1e-6)
    else:
        zeros = torch.zeros(3, dtype=torch.float64)
        torch.testing.assert_close(zeros.index_add(0, groups, found.sum(-1) / mask.sum(-1)), zeros)


@pytest.mark.parametrize("name", LOSSES)
@quick
@given(seed=seeds, cut=st.integers(1, 11))
def test_a_loss_does_not_depend_on_the_cut_and_masked_tokens_have_no_gradient(name: str, seed: int, cut: int) -> None:
    chosen, numbers = algorithm(loss=name), a_step(seed)
    whole, gradient = loss_and_gradient(chosen, list(range(12)), numbers)
    assert not gradient[~numbers[1]].any() and gradient.isfinite().all()
    parts = [loss_and_gradient(chosen, rows, numbers) for rows in (list(range(cut)), list(range(cut, 12)))]
    assert sum(value for value, _ in parts) == pytest.approx(whole, abs=1e-9)
    torch.testing.assert_close(torch.cat([grad for _, grad in parts]), gradient, rtol=1e-6, atol=1e-9)


@quick
@given(seed=seeds)
def test_the_clips_gradient_is_zero_where_the_papers_say(seed: int) -> None:
    """Outside the clip in the advantage's direction (Schulman et al. 2017), beyond the dual clip (Ye et al. 2020)."""
    numbers = a_step(seed)
    _, mask, _, log_prob, behaviour, advantages = numbers
    chosen = algorithm(loss="ppo_clip", ratio="behaviour")
    _, gradient = loss_and_gradient(chosen, list(range(12)), numbers)
    ratio = (log_prob - behaviour).exp()
    flat = torch.where(advantages > 0, ratio > 1.2, (ratio < 0.8) | (ratio > 3.0))
    assert torch.equal(gradient == 0, flat | ~mask)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("geo_mean", "clip_cov")])
@quick
@given(seed=seeds)
def test_at_lag_0_every_loss_is_the_policy_gradient(name: str, seed: int) -> None:
    """Before the first update the ratio is 1: the gradient is -A / tokens, but for the reduction."""
    numbers = a_step(seed)
    chosen = algorithm(loss=name, ratio="behaviour", aggregation="token-mean")
    scores, mask, groups, log_prob, _, advantages = numbers
    _, gradient = loss_and_gradient(chosen, list(range(12)), (scores, mask, groups, log_prob, log_prob, advantages))
    torch.testing.assert_close(gradient, -advantages * mask / mask.sum(), rtol=1e-6, atol=1e-9)


@quick
@given(seed=seeds)
def test_what_clip_cov_picks_loses_its_gradient_and_nothing_else_does(seed: int) -> None:
    scores, mask, groups, log_prob, _, advantages = a_step(seed)
    chosen = Algorithm(
        AlgorithmConfig.model_validate({"loss": {"type": "clip_cov", "cov_low": 0.1, "drop_fraction": 0.2}})
    )
    picked = chosen.pick(log_prob, log_prob, advantages, mask, 0)
    assert int(picked.sum()) <= max(1, int(0.2 * int(mask.sum()))) and not picked[~mask].any()
    _, gradient = loss_and_gradient(chosen, list(range(12)), (scores, mask, groups, log_prob, log_prob, advantages))
    torch.testing.assert_close(gradient, -advantages * (mask & ~picked) / mask.sum(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in CORRECTIONS if name != "none"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@quick
@given(seed=seeds)
def test_at_lag_0_every_correction_is_the_identity(name: str, level: str, seed: int) -> None:
    _, mask, _, log_prob, _, advantages = a_step(seed)
    config = {"correction": {"type": name, "level": level}, "ratio": "proximal"}
    chosen = Algorithm(AlgorithmConfig.model_validate(config))
    weights, _ = chosen.weights(Part(log_prob, log_prob, advantages, mask))
    assert weights is not None
    torch.testing.assert_close(weights, mask.double())


@quick
@given(seed=seeds)
def test_what_is_rejected_has_no_gradient_and_at_lag_0_nothing_is(seed: int) -> None:
    rules = [{"kind": "token_k1", "lower": 0.8, "upper": 1.25}, {"kind": "seq_mean_k3", "upper": 0.05}]
    chosen, numbers = algorithm(reject=rules), a_step(seed)
    scores, mask, groups, log_prob, behaviour, advantages = numbers
    _, gradient = loss_and_gradient(chosen, list(range(12)), numbers)
    ratio = (behaviour - log_prob).exp()
    assert not gradient[(ratio < 0.8) | (ratio > 1.25)].any()
    fresh = (scores, mask, groups, log_prob, log_prob, advantages)
    plain = loss_and_gradient(algorithm(), list(range(12)), fresh)
    torch.testing.assert_close(loss_and_gradient(chosen, list(range(12)), fresh)[1], plain[1])


@quick
@given(seed=seeds)
def test_the_penalty_to_the_sampler_is_of_all_tokens_whatever_leaves_them_out(seed: int) -> None:
    """prime-rl's default loss: Σ (−[kept] A π/μ + τ log²(π/μ)) / tokens, of which kept are those within the region."""
    _, mask, _, log_prob, behaviour, advantages = numbers = a_step(seed)
    how = {"loss": {"type": "dppo_tv", "threshold_low": 0.2, "threshold_high": 0.2}, "sampler_penalty": 0.3}
    chosen = Algorithm(AlgorithmConfig.model_validate(how))
    _, gradient = loss_and_gradient(chosen, list(range(12)), numbers)
    leaf = log_prob.clone().requires_grad_()
    moved = log_prob.exp() - behaviour.exp()
    kept = torch.where(advantages > 0, moved <= 0.2, moved >= -0.2)
    d = leaf - behaviour
    theirs = ((-kept.double() * advantages * d.exp() + 0.3 * d.square()) * mask).sum() / mask.sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(theirs, leaf)[0])
    left_out = Algorithm(AlgorithmConfig.model_validate(how | {"reject": [{"kind": "token_k3", "upper": 1e-30}]}))
    _, gradient = loss_and_gradient(left_out, list(range(12)), numbers)
    torch.testing.assert_close(gradient, 0.6 * (log_prob - behaviour) * mask / mask.sum())


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_it_expands_to(name: str) -> None:
    config = AlgorithmConfig.model_validate({"preset": name, "length_scale": 12})
    for key, value in PRESETS[name].items():
        found = getattr(config, key)
        assert (found == value) if isinstance(value, str) else value.items() <= found.model_dump().items()
    assert AlgorithmConfig.model_validate(config.model_dump()) == config


def test_options_of_the_default_need_no_type() -> None:
    made = AlgorithmConfig.model_validate({"advantage": {"std": False}, "loss": {"clip_high": 0.28}})
    assert made.advantage.type == "grpo" and made.loss.type == "ppo_clip" and made.loss.clip_high == 0.28
    of_preset = AlgorithmConfig.model_validate({"preset": "ppo", "advantage": {"lam": 0.9}, "loss": {"clip_low": 0.1}})
    assert of_preset.advantage.type == "gae" and of_preset.loss.type == "ppo_clip"
    for other in ({"advantage": {"lam": 0.9}}, {"loss": {"clip_high": 0.3, "temperature": 1.0}}):
        with pytest.raises(ValidationError, match="Unable to extract tag"):
            AlgorithmConfig.model_validate(other)


def test_a_preset_and_another_choice_are_an_error() -> None:
    with pytest.raises(ValidationError, match=r"preset=gspo takes loss=\{type: gspo\}, and ppo_clip is given"):
        AlgorithmConfig.model_validate({"preset": "gspo", "loss": {"type": "ppo_clip"}})
    mine = AlgorithmConfig.model_validate({"preset": "dapo", "loss": {"type": "ppo_clip", "clip_high": 0.3}})
    assert mine.loss.model_dump()["clip_high"] == 0.3 and mine.loss.model_dump()["clip_low"] == 0.2, "numbers are tuned"
    for chosen, why in (
        ({"preset": "dapo", "aggregation": "seq-mean-token-mean"}, "preset=dapo takes aggregation=token-mean"),
        ({"preset": "dr_grpo", "advantage": {"type": "grpo", "std": True}}, "dr_grpo takes advantage.std=False"),
        ({"preset": "dapo", "loss": {"clip_high": 0.3}}, None),
        (
            {"preset": "dapo", "advantage": {"type": "gae"}},
            "dapo takes advantage={type: grpo}, and gae is given",
        ),
        ({"preset": "grpo", "loss": {"type": "gspo"}}, "preset=grpo takes loss={type: ppo_clip}, and gspo is given"),
        ({"preset": "rloo", "loss": {"type": "sapo"}}, "takes loss={type: ppo_clip or reinforce}, and sapo is given"),
        ({"preset": "rloo", "loss": {"type": "reinforce"}}, None),
        ({"preset": "topr", "advantage": {"type": "rloo"}}, None),
    ):
        said = contradicted(chosen["preset"], AlgorithmConfig.model_validate(chosen).model_dump())
        assert (why is None and said is None) or (why and said and why in said), said


@quick
@given(seed=seeds, exponent=st.floats(0, 2))
def test_a_clip_that_follows_age_is_narrower_for_older_tokens_and_the_same_at_lag_0(seed: int, exponent: float) -> None:
    _, mask, _, log_prob, behaviour, advantages = a_step(seed)
    lags = torch.randint(0, 5, mask.shape)
    plain, _ = ppo_clip(behaviour, log_prob, advantages, mask)
    aged, _ = ppo_clip(behaviour, log_prob, advantages, mask, lags=lags, lag_exponent=exponent)
    for lag in range(5):
        width = 0.2 * (1 + lag) ** -exponent
        alone, _ = ppo_clip(behaviour, log_prob, advantages, mask, clip_low=width, clip_high=width)
        torch.testing.assert_close(aged[lags == lag], alone[lags == lag])
    torch.testing.assert_close(aged[lags == 0], plain[lags == 0])


@quick
@given(seed=seeds)
def test_the_interpolated_start_lies_between_and_is_exact_where_policies_move_evenly(seed: int) -> None:
    _, mask, _, start, _, advantages = a_step(seed)
    lags, velocity = torch.randint(0, 5, mask.shape), 0.1 * torch.randn(mask.shape, dtype=torch.float64)
    behaviour, now = start - lags * velocity, start + velocity  # log-probabilities, linear in the version
    one = algorithm(ratio="interpolated", loss="ppo_clip", correction="truncated")
    assert not one._config.needs_proximal and "lags" in one.columns
    part = Part(now.requires_grad_(), behaviour, advantages, mask, {"lags": lags.float()}, start)
    torch.testing.assert_close(one.start(part), start)
    same = Part(now, behaviour, advantages, mask, {}, start)
    totals = Totals(float(mask.sum()), float(len(mask)))
    wanted, _ = algorithm(ratio="proximal", loss="ppo_clip", correction="truncated").loss(same, totals)
    torch.testing.assert_close(one.loss(part, totals)[0], wanted)


@quick
@given(rows=st.integers(3, 31), value=st.sampled_from([0.1, 0.2, 0.3, 0.7]))
def test_gpg_counts_answers_of_groups_that_teach_something(rows: int, value: float) -> None:
    """Chu et al. 2025: α = B / (B − M), M of B answers being in groups whose rewards are all equal."""
    scores = torch.cat([torch.full((rows,), value), torch.tensor([0.0, 1.0, 1.0])])  # float32, as rewards come
    found = gpg(scores, torch.ones(rows + 3, 1), torch.tensor([0] * rows + [1] * 3))[:, 0]
    torch.testing.assert_close(found[-3:], (rows + 3) / 3 * torch.tensor([-2.0, 1.0, 1.0]) / 3)
    assert found[:rows].abs().max() < 1e-4


@quick
@given(seed=seeds)
def test_the_penalty_is_no_larger_where_an_answer_is_longer(seed: int) -> None:
    """GMPO's loss is of the whole answer, the penalty of its tokens: their mean, whatever the length."""
    _, mask, _, log_prob, behaviour, advantages = a_step(seed)
    part = Part(log_prob, behaviour, advantages, mask, {"reference": log_prob - 0.5})
    totals = Totals(float(mask.sum()), float(len(mask)))
    kl = {"coefficient": 1.0}
    with_it, without = (algorithm(loss="geo_mean", **more).loss(part, totals)[0] for more in ({"kl": kl}, {}))
    assert float(with_it - without) == pytest.approx(math.exp(-0.5) + 0.5 - 1, rel=1e-4)


@pytest.mark.parametrize(
    ("chosen", "why"),
    [({"advantage": {"type": "maxrl"}, "kl": {"place": "reward", "coefficient": 0.1}}, "must not be negative"),
     ({"advantage": {"type": "maxrl"}, "constraints": [{"column": "reward/length", "limit": 5}]}, "not be negative"),
     ({"preset": "gmpo", "reject": [{"kind": "token_k1", "upper": 2.0}]}, "take a rule of trajectories")],
)  # fmt: skip
def test_what_would_train_something_else_is_refused(chosen: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        AlgorithmConfig.model_validate(chosen)


def test_a_penalty_in_the_reward_is_ppos_and_grpo_has_its_own_mean() -> None:
    in_reward, in_loss = ({"kl": {"coefficient": 0.1, **where}} for where in ({"place": "reward"}, {}))
    assert AlgorithmConfig.model_validate(in_reward).kl.kind == "k1"
    assert AlgorithmConfig.model_validate(in_loss).kl.kind == "k3"
    assert AlgorithmConfig.model_validate({"preset": "grpo"}).aggregated == "seq-mean-token-mean"
