"""The losses against reference numbers: every file of tests/golden, by its name, to its own tolerance in float64."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.services.critic.value_loss import value_loss
from penstock.services.learning.kl_in_reward import adapted, kl_in_reward
from penstock.services.learning.kl_penalty import kl_penalty
from penstock.services.learning.masked_mean import masked_mean
from penstock.services.learning.token_returns import discounted, gae, whiten
from penstock.services.modeling.parallel.world import World
from penstock.services.modeling.token_statistics import token_statistics
from penstock.services.trainer.algorithm_config import RejectRule
from penstock.services.trainer.algorithms.advantages.gdpo import gdpo
from penstock.services.trainer.algorithms.advantages.gpg import gpg
from penstock.services.trainer.algorithms.advantages.grpo import grpo
from penstock.services.trainer.algorithms.advantages.grpo_passk import grpo_passk
from penstock.services.trainer.algorithms.advantages.opo import opo
from penstock.services.trainer.algorithms.advantages.optimal_token_baseline import optimal_token_baseline
from penstock.services.trainer.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus_baseline
from penstock.services.trainer.algorithms.advantages.remax import remax
from penstock.services.trainer.algorithms.advantages.rloo import rloo
from penstock.services.trainer.algorithms.agg_loss import agg_loss
from penstock.services.trainer.algorithms.corrections.icepop import icepop
from penstock.services.trainer.algorithms.corrections.rejection import rejection
from penstock.services.trainer.algorithms.corrections.truncated import truncated
from penstock.services.trainer.algorithms.corrections.weights import mean_terms, spread
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
from penstock.services.trainer.mismatch import Mismatch

FOLDER = Path(__file__).parent / "golden"
Check = Callable[[dict[str, Any], "Numbers"], None]


class Numbers:
    """Compares what a case gives, at its file's tolerance, and notes which of its outputs were looked at."""

    def __init__(self, wanted: dict[str, Any], tolerance: dict[str, float]) -> None:
        self.wanted, self._tolerance = wanted, tolerance
        self.left = set(wanted)

    def same(self, name: str, found: torch.Tensor | float) -> None:
        self.left.discard(name)
        torch.testing.assert_close(
            torch.as_tensor(found, dtype=torch.float64).detach(), tensor(self.wanted[name]), **self._tolerance
        )


def tensor(value: Any, grad: bool = False) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=grad)


def optional(value: Any) -> torch.Tensor | None:
    return None if value is None else tensor(value)


def advantage(function: Callable[..., torch.Tensor], **fixed: Any) -> Check:
    def check(given: dict[str, Any], numbers: Numbers) -> None:
        known = ("scores", "mask", "groups")
        options = {name: value for name, value in given.items() if name not in known} | fixed
        found = function(tensor(given["scores"]), tensor(given["mask"]), torch.tensor(given["groups"]), **options)
        numbers.same("advantages", found)
        numbers.left.discard("advantages_single_zero")  # the other common choice, which is not ours

    return check


def check_gdpo(given: dict[str, Any], numbers: Numbers) -> None:
    parts, mask = [tensor(part) for part in given["components"]], tensor(given["mask"])
    found = gdpo(parts[0] * 0, mask, torch.tensor(given["groups"]), *parts, weights=given["weights"])
    numbers.same("advantages", found)


def check_reinforce_plus_plus(given: dict[str, Any], numbers: Numbers) -> None:
    mask = tensor(given["mask"])
    returns = discounted(tensor(given["rewards"]), mask, given["gamma"])
    numbers.same("returns", returns)
    numbers.same("advantages", whiten(returns, mask))


def check_remax(given: dict[str, Any], numbers: Numbers) -> None:
    rewards, mask, baselines = (tensor(given[name]) for name in ("rewards", "mask", "baselines"))
    found = remax(rewards, mask, torch.arange(len(mask)), baselines)
    numbers.same("advantages", found)
    numbers.same("returns", discounted(rewards, mask, 1.0))


def loss(function: Callable[..., Any], agg: str | None = None, every_row: bool = False) -> Check:
    """``agg``: the reduction that the method has, where the file gives none; ``every_row``: its mean is also over rows
    without a token."""

    def check(given: dict[str, Any], numbers: Numbers) -> None:
        log_prob, mask = tensor(given["log_prob"], grad=True), tensor(given["mask"])
        names = inspect.signature(function).parameters
        options = {name: value for name, value in given.items() if name in names and name.startswith(OPTIONS)}
        losses, metrics = function(
            tensor(given["old_log_prob"]), log_prob, tensor(given["advantages"]), mask,
            optional(given["importance_weights"]), **options,
        )  # fmt: skip
        rows = len(mask) if every_row else None
        found = agg_loss(losses, mask, agg or given["agg"], given.get("length_scale"), global_sequences=rows)
        numbers.same("loss", found)
        found.backward()
        numbers.same("grad_log_prob", log_prob.grad)
        for name in metrics.keys() & numbers.wanted.keys():
            numbers.same(name, metrics[name])

    return check


OPTIONS = ("clip", "dual", "tau", "threshold", "ratio_cap", "beta", "kl_coef")


def picking(function: Callable[..., Any], pick: Callable[..., torch.Tensor], *names: str) -> Check:
    """A loss that picks tokens out of the whole update: by the options ``names``."""

    def check(given: dict[str, Any], numbers: Numbers) -> None:
        log_prob, mask = tensor(given["log_prob"], grad=True), tensor(given["mask"])
        old, advantages = tensor(given["old_log_prob"]), tensor(given["advantages"])
        chosen = {name: given[name] for name in names}
        picked = pick(old, log_prob.detach(), advantages, mask, torch.Generator().manual_seed(0), **chosen).double()
        names_of = inspect.signature(function).parameters
        options = {name: value for name, value in given.items() if name in names_of and name.startswith(OPTIONS)}
        weights = optional(given["importance_weights"])
        losses, metrics = function(old, log_prob, advantages, mask, weights, picked, **options)
        found = agg_loss(losses, mask, given["agg"], given.get("length_scale"))
        if "loss" in numbers.wanted:
            numbers.same("loss", found)
            found.backward()
            numbers.same("grad_log_prob", log_prob.grad)
        for name in metrics.keys() & numbers.wanted.keys():
            numbers.same(name, metrics[name])

    return check


def correction(function: Callable[..., Any], level: str) -> Check:
    def check(given: dict[str, Any], numbers: Numbers) -> None:
        mask = tensor(given["mask"])
        bounds = {name: given[name] for name in ("lower", "upper") if given[name] is not None}
        weights, metrics = function(
            tensor(given["train_log_prob"]), tensor(given["rollout_log_prob"]), mask, level=level, **bounds
        )
        if given["normalize"]:
            total, count = mean_terms(weights, mask, level)
            weights = weights / (total / count)
        numbers.same("weights", weights)
        metrics |= spread(float(metrics["mean"]), float(metrics.pop("square")))
        for name in metrics.keys() & numbers.wanted.keys():
            numbers.same(name, metrics[name])

    return check


def check_rejection(given: dict[str, Any], numbers: Numbers) -> None:
    kept, metrics = rejection(
        tensor(given["train_log_prob"]), tensor(given["rollout_log_prob"]), tensor(given["mask"]),
        [RejectRule.model_validate(rule) for rule in given["rules"]], -torch.ones_like(tensor(given["mask"])),
    )  # fmt: skip
    numbers.same("mask", kept.double())
    for name in metrics.keys() & numbers.wanted.keys():
        numbers.same(name, metrics[name])


def check_kl_penalty(given: dict[str, Any], numbers: Numbers) -> None:
    log_prob = tensor(given["log_prob"], grad=True)
    kl = kl_penalty(log_prob, tensor(given["ref_log_prob"]), given["kind"], given["gradient"])
    numbers.same("kl", kl)
    kl.sum().backward()
    numbers.same("grad_log_prob", log_prob.grad)


def check_agg_loss(given: dict[str, Any], numbers: Numbers) -> None:
    values = tensor(given["values"], grad=True)
    found = given["workers"] * agg_loss(
        values, tensor(given["mask"]), given["mode"], given["length_scale"], given["global_tokens"],
        given["global_sequences"],
    )  # fmt: skip
    numbers.same("loss", found)
    found.backward()
    numbers.same("grad_values", values.grad)


def check_gae(given: dict[str, Any], numbers: Numbers) -> None:
    mask = tensor(given["mask"])
    estimates, returns = gae(tensor(given["rewards"]), tensor(given["values"]), mask, given["gamma"], given["lam"])
    numbers.same("raw_advantages", estimates)
    numbers.same("returns", returns)
    numbers.same("advantages", whiten(estimates, mask))


def check_value_loss(given: dict[str, Any], numbers: Numbers) -> None:
    values, mask = tensor(given["values"], grad=True), tensor(given["mask"])
    losses, clipped = value_loss(values, tensor(given["old_values"]), tensor(given["returns"]), given["clip"])
    found = agg_loss(losses, mask, given["agg"], given.get("length_scale"))
    numbers.same("loss", found)
    found.backward()
    numbers.same("grad_values", values.grad)
    numbers.same("clip_fraction", masked_mean(clipped.double(), mask))


def check_kl_in_reward(given: dict[str, Any], numbers: Numbers) -> None:
    scores, mask = tensor(given["scores"]), tensor(given["mask"])
    log_prob, reference = tensor(given["log_prob"]), tensor(given["ref_log_prob"])
    kl, mean = kl_in_reward(log_prob, reference, mask, given["kind"])
    numbers.same("rewards", scores - given["coefficient"] * kl)
    numbers.same("mean_kl", mean)
    following = adapted(given["coefficient"], mean, given["target"], given["horizon"], len(scores))
    numbers.same("next_coefficient", following)


def check_adaptive_kl(given: dict[str, Any], numbers: Numbers) -> None:
    coefficient, found = given["initial"], []
    for kl, rows in zip(given["kl"], given["steps"], strict=True):
        coefficient = adapted(coefficient, kl, given["target"], given["horizon"], rows)
        found.append(coefficient)
    numbers.same("coefficients", torch.tensor(found, dtype=torch.float64))


def check_optimal_token_baseline(given: dict[str, Any], numbers: Numbers) -> None:
    rewards, mask = tensor(given["rewards"]), tensor(given["mask"])
    found = optimal_token_baseline(
        rewards, mask, torch.tensor(given["groups"]), tensor(given["log_prob"]), tensor(given["sum_sq_probs"]),
        optional(given["importance_weights"]), zero_tail=given["zero_tail"],
    )  # fmt: skip
    numbers.same("advantages", found)
    numbers.same("returns", discounted(rewards, mask, 1.0))


def check_token_logprob(given: dict[str, Any], numbers: Numbers) -> None:
    logits, mask, labels = tensor(given["logits"], grad=True), tensor(given["mask"]), torch.tensor(given["labels"])
    found = token_statistics(logits.flatten(0, 1), labels.flatten(), wanted=("log_prob", "entropy", "squares"))
    log_prob, entropy, squares = found.unflatten(1, labels.shape)
    for name, values in {"log_prob": log_prob, "entropy": entropy, "sum_sq_probs": squares}.items():
        numbers.same(name, values)
    (log_prob * mask).sum().backward()
    numbers.same("grad_logits", logits.grad)


def check_entropy_loss(given: dict[str, Any], numbers: Numbers) -> None:
    logits, mask = tensor(given["logits"], grad=True), tensor(given["mask"])
    some = torch.zeros(mask.numel(), dtype=torch.long)
    (entropy,) = token_statistics(logits.flatten(0, 1), some, wanted=("entropy",)).unflatten(1, mask.shape)
    numbers.same("token_entropy", entropy)
    found = agg_loss(entropy, mask, given["agg"], given.get("length_scale"))
    numbers.same("loss", found)
    found.backward()
    numbers.same("grad_logits", logits.grad)


def check_mismatch(given: dict[str, Any], numbers: Numbers) -> None:
    mismatch, half = Mismatch(), len(given["mask"]) // 2
    for rows in (slice(0, half), slice(half, None), slice(0, 0)):  # however a step is cut, an empty part too
        train, rollout = tensor(given["train_log_prob"])[rows], tensor(given["rollout_log_prob"])[rows]
        mask = tensor(given["mask"])[rows].bool()
        mismatch.add(train, rollout, mask, torch.zeros_like(mask))
    found = mismatch.metrics(World(torch.device("cpu")))
    for name in set(numbers.wanted) & {name.removeprefix("mismatch_") for name in found}:
        numbers.same(name, found[f"mismatch_{name}"])
    numbers.same("log_ppl_diff", found["mismatch_train_log_ppl"] - found["mismatch_rollout_log_ppl"])
    numbers.left -= {"log_ppl_diff_max", "log_ppl_diff_min", "ppl_ratio"}  # are no metrics of ours


CHECKS: dict[str, Check] = {
    "adaptive_kl": check_adaptive_kl,
    "kl_in_reward": check_kl_in_reward,
    "agg_loss": check_agg_loss,
    "cispo": loss(cispo),
    "clip_cov": picking(clip_cov, pick_clipped, "clip_low", "clip_high", "cov_low", "cov_high", "drop_fraction"),
    "kl_cov": picking(kl_cov, pick_penalized, "top_fraction"),
    "dppo_kl": loss(dppo_kl),
    "dppo_tv": loss(dppo_tv),
    "dro": loss(dro),
    "entropy_loss": check_entropy_loss,
    "gae": check_gae,
    "gdpo": check_gdpo,
    "geo_mean": loss(geo_mean, "seq-mean-token-mean", every_row=True),
    "gpg_advantage": advantage(gpg),
    "gpg_loss": loss(reinforce),
    "grpo": advantage(grpo),
    "grpo_leave_one_out": advantage(grpo),
    "grpo_no_std": advantage(grpo, std=False),
    "grpo_passk": advantage(grpo_passk),
    "gspo": loss(gspo),
    "is_sequence_icepop": correction(icepop, "sequence"),
    "is_sequence_truncated": correction(truncated, "sequence"),
    "is_token_icepop": correction(icepop, "token"),
    "is_token_truncated": correction(truncated, "token"),
    "kl_penalty": check_kl_penalty,
    "offpolicy_metrics": check_mismatch,
    "opo": advantage(opo),
    "optimal_token_baseline": check_optimal_token_baseline,
    "optimal_token_baseline_multi_turn": check_optimal_token_baseline,
    "ppo_clip": loss(ppo_clip),
    "reinforce": loss(reinforce),
    "reinforce_plus_plus": check_reinforce_plus_plus,
    "reinforce_plus_plus_baseline": advantage(reinforce_plus_plus_baseline),
    "rejection_masks": check_rejection,
    "remax": check_remax,
    "rloo": advantage(rloo),
    "sapo": loss(sapo, "seq-mean-token-mean"),
    "token_logprob": check_token_logprob,
    "value_loss": check_value_loss,
}


def cases() -> list[Any]:
    found = []
    for path in sorted(FOLDER.glob("*.json")):
        golden = json.loads(path.read_text())
        tolerance = golden["tolerance"]["float64"]
        found += [
            pytest.param(path.stem, case, tolerance, id=f"{path.stem}: {case['name']}") for case in golden["cases"]
        ]
    return found


def test_every_file_has_its_check() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(CHECKS)


@pytest.mark.parametrize(("name", "case", "tolerance"), cases())
def test_golden(name: str, case: dict[str, Any], tolerance: dict[str, float]) -> None:
    numbers = Numbers(case["outputs"], tolerance)
    CHECKS[name](case["inputs"], numbers)
    assert not numbers.left, "outputs that were not compared"
