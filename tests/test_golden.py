"""The losses against reference numbers, to 1e-6 in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.services.modeling.parallel.world import World
from penstock.services.trainer.algorithms.agg_loss import agg_loss
from penstock.services.trainer.algorithms.grpo import grpo
from penstock.services.trainer.algorithms.kl_penalty import kl_penalty
from penstock.services.trainer.algorithms.ppo_clip import ppo_clip
from penstock.services.trainer.algorithms.truncated import truncated
from penstock.services.trainer.mismatch import Mismatch

FOLDER = Path(__file__).parent / "golden"


def cases(name: str) -> list[Any]:
    golden = json.loads((FOLDER / f"{name}.json").read_text())
    return [pytest.param(case, id=f"{name}: {case['name']}") for case in golden["cases"]]


def tensor(value: Any, grad: bool = False) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=grad)


def same(found: torch.Tensor | float, expected: Any) -> None:
    torch.testing.assert_close(torch.as_tensor(found, dtype=torch.float64), tensor(expected), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("case", cases("grpo") + cases("grpo_no_std"))
def test_grpo(case: dict, request: pytest.FixtureRequest) -> None:
    given = case["inputs"]
    found = grpo(
        tensor(given["scores"]), tensor(given["mask"]), torch.tensor(given["groups"]),
        std="no_std" not in request.node.name,
    )  # fmt: skip
    same(found, case["outputs"]["advantages"])


@pytest.mark.parametrize("case", cases("ppo_clip"))
def test_ppo_clip(case: dict) -> None:
    given, wanted = case["inputs"], case["outputs"]
    log_prob, mask = tensor(given["log_prob"], grad=True), tensor(given["mask"])
    weights = given["importance_weights"]
    losses, metrics = ppo_clip(
        tensor(given["old_log_prob"]), log_prob, tensor(given["advantages"]), mask,
        None if weights is None else tensor(weights), given["clip_low"], given["clip_high"], given["dual_clip"],
    )  # fmt: skip
    loss = agg_loss(losses, mask, given["agg"], given.get("length_scale"))
    same(loss.detach(), wanted["loss"])
    loss.backward()
    same(log_prob.grad, wanted["grad_log_prob"])
    for name in ("clip_fraction", "clip_fraction_dual", "approx_kl"):
        same(metrics[name], wanted[name])


@pytest.mark.parametrize("case", cases("is_token_truncated"))
def test_truncated(case: dict) -> None:
    given, wanted = case["inputs"], case["outputs"]
    weights, metrics = truncated(
        tensor(given["train_log_prob"]), tensor(given["rollout_log_prob"]), tensor(given["mask"]),
        given["upper"], given["normalize"],
    )  # fmt: skip
    same(weights, wanted["weights"])
    for name in metrics.keys() & wanted.keys():
        same(metrics[name], wanted[name])


@pytest.mark.parametrize("case", cases("kl_penalty"))
def test_kl_penalty(case: dict) -> None:
    given, wanted = case["inputs"], case["outputs"]
    log_prob = tensor(given["log_prob"], grad=True)
    kl = kl_penalty(log_prob, tensor(given["ref_log_prob"]), given["kind"], given["gradient"])
    same(kl.detach(), wanted["kl"])
    kl.sum().backward()
    same(log_prob.grad, wanted["grad_log_prob"])


@pytest.mark.parametrize("case", cases("agg_loss"))
def test_agg_loss(case: dict) -> None:
    given, wanted = case["inputs"], case["outputs"]
    values = tensor(given["values"], grad=True)
    loss = agg_loss(
        values, tensor(given["mask"]), given["mode"], given["length_scale"], given["global_tokens"],
        given["global_sequences"],
    ) * given["workers"]  # fmt: skip
    same(loss.detach(), wanted["loss"])
    loss.backward()
    same(values.grad, wanted["grad_values"])


@pytest.mark.parametrize("case", cases("offpolicy_metrics"))
def test_mismatch(case: dict) -> None:
    given, wanted = case["inputs"], case["outputs"]
    mismatch, half = Mismatch(), len(given["mask"]) // 2
    for rows in (slice(0, half), slice(half, None)):  # however a step is cut into micro-batches
        train, rollout = tensor(given["train_log_prob"])[rows], tensor(given["rollout_log_prob"])[rows]
        mask = tensor(given["mask"])[rows].bool()
        mismatch.add(train, rollout, mask, torch.zeros_like(mask))
    found = mismatch.metrics(World(torch.device("cpu")))
    for name in set(wanted) & {name.removeprefix("mismatch_") for name in found}:
        same(found[f"mismatch_{name}"], wanted[name])
    assert len(set(wanted) & {name.removeprefix("mismatch_") for name in found}) == 9
    same(found["mismatch_train_log_ppl"] - found["mismatch_rollout_log_ppl"], wanted["log_ppl_diff"])
