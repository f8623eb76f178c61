"""What a step asks of the policy beside log-probabilities: entropy for the bonus, squares for a baseline."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.services.modeling import logprobs as module
from penstock.services.modeling.packing import plan_rows
from penstock.services.modeling.token_statistics import token_statistics
from penstock.services.trainer.algorithm_config import RejectRule
from penstock.services.trainer.algorithms.corrections.rejection import rejection
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from tests.trainer.rank_program import a_model
from tests.trainer.steps import a_step


def learner(**algorithm: Any) -> Learner:
    return Learner(a_model(), TrainerConfig.model_validate({"algorithm": algorithm, "optimizer": {"lr": 1e-2}}), 1.0)


def entropies(model: Any, temperature: float = 1.0) -> torch.Tensor:
    """Of every place of `a_step` where a token was sampled, from the whole logits."""
    found = []
    for trajectory in a_step(0).trajectories:
        ids = torch.from_numpy(trajectory.tokens.astype(np.int64))
        logs = (model(ids[None]).logits[0].float() / temperature).log_softmax(-1)[:-1]
        found.append(-(logs.exp() * logs).sum(-1)[torch.from_numpy(trajectory.loss_mask[1:] == 1)])
    return torch.cat(found)


def test_the_entropy_bonus_is_the_exact_entropy_and_raises_it() -> None:
    plain, bonus = learner(), learner(entropy_bonus=0.5)
    wanted = float(entropies(plain.model).mean().detach())
    without, with_it = plain.train(a_step(0)), bonus.train(a_step(0))
    assert with_it["entropy"] == pytest.approx(wanted, rel=1e-5)
    assert with_it["loss"] == pytest.approx(without["loss"] - 0.5 * wanted, rel=1e-4)
    assert float(entropies(bonus.model).mean()) > float(entropies(plain.model).mean())


def test_statistics_made_in_chunks_are_those_of_whole_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, step = a_model(), a_step(0)
    monkeypatch.setattr(module, "LOGIT_BYTES", 4 * model.config.vocab_size * 3)
    rows = next(iter(plan_rows(step.trajectories, step.groups, 100_000, torch.device("cpu"))))
    found = module.statistics(model, rows, 0.7, ("log_prob", "entropy", "squares"))
    torch.testing.assert_close(found[0], module.logprobs(model, rows, 0.7))
    order = np.argsort([int(index) for index in rows.index])
    mine = torch.cat([found[1][k][rows.mask[k]] for k in order])
    torch.testing.assert_close(mine, entropies(model, 0.7), rtol=1e-4, atol=1e-5)
    assert (found[2][rows.mask] > 0).all() and (found[2][rows.mask] <= 1).all()


def test_statistics_over_candidates_are_those_of_their_own_distribution() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    candidates = torch.tensor([[2, 5, -1], [1, 3, 7], [-1, -1, -1]])
    found = token_statistics(logits, torch.tensor([5, 3, 0]), 1.0, candidates, ("log_prob", "entropy", "squares"))
    for row, ids in enumerate(([2, 5], [1, 3, 7], list(range(10)))):
        p = logits[row, ids].softmax(-1)
        chosen = [5, 3, 0][row]
        wanted = torch.stack([p[ids.index(chosen)].log(), -(p * p.log()).sum(), (p * p).sum()])
        torch.testing.assert_close(found[:, row], wanted)
    found.sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all() and not logits.grad[0, [0, 1, 3]].any()


@pytest.mark.parametrize(
    ("correction", "ratio"), [("none", "behaviour"), ("truncated", "behaviour"), ("truncated", "interpolated")]
)
def test_the_optimal_baseline_does_not_depend_on_the_micro_batches(correction: str, ratio: str) -> None:
    found = []
    for budget in (64, 100_000):
        loss = "ppo_clip" if ratio == "interpolated" else "reinforce"
        chosen = {"advantage": {"type": "optimal_token_baseline"}, "loss": {"type": loss}, "ratio": ratio}
        config = {"tokens_per_micro_batch": budget, "algorithm": {**chosen, "correction": {"type": correction}}}
        found.append(Learner(a_model(), TrainerConfig.model_validate(config), 1.0).accumulate(a_step(0))[0])
    assert found[0] == pytest.approx(found[1], rel=1e-4) and found[0] != 0


def test_a_rule_for_negative_advantages_leaves_the_others_alone() -> None:
    policy, engine = torch.full((3, 4), -2.0), torch.full((3, 4), -1.0)  # the policy would hardly say this any more
    advantages, mask = torch.tensor([-1.0, 0.0, 1.0])[:, None].expand(3, 4), torch.ones(3, 4)
    rule = RejectRule(kind="seq_mean_k1", upper=1.5, of="negative")
    kept, metrics = rejection(policy, engine, mask, [rule], advantages)
    assert kept.all(-1).tolist() == [False, True, True] and float(metrics["rejected_rows"]) == pytest.approx(1 / 3)
    assert rejection(engine, policy, mask, [rule], advantages)[0].all(), "drift the other way is no harm"
