"""A teacher: what its scorer says, and where it pulls the policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import Qwen3Config, Qwen3ForCausalLM

from penstock.services.learning.batch import TrainingBatch
from penstock.services.modeling.teacher import Teacher
from penstock.services.runtime.custom_scorer import CustomScorer, ScorerConfig
from penstock.services.runtime.scorer import ScoringTask
from penstock.services.trainer.algorithm_config import AlgorithmConfig
from penstock.services.trainer.algorithms.advantages.distillation import distillation
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from tests.conftest import TINY, make_group
from tests.trainer.rank_program import a_model
from tests.trainer.steps import a_step


def test_a_teacher_says_what_its_model_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**TINY)).eval()
    model.save_pretrained(tmp_path)
    group = make_group(np.random.default_rng(0), 0)
    found = Teacher(str(tmp_path), column="wise", dtype="float32", device="cpu").score_group(group, {})["wise"]
    start = 0
    for trajectory in group.trajectories:
        ids = torch.from_numpy(trajectory.tokens.astype(np.int64))[None]
        logs = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(-1, ids[0, 1:, None])[:, 0]
        mine = found[start : start + len(trajectory.tokens)]
        sampled = trajectory.loss_mask == 1
        np.testing.assert_allclose(mine[sampled], logs.detach().numpy()[sampled[1:]], atol=1e-4)
        assert not mine[~sampled].any()
        start += len(trajectory.tokens)
    assert start == len(found)


def test_a_run_tells_a_teacher_its_column_and_its_temperature(tmp_path: Path) -> None:
    a_model().save_pretrained(tmp_path)
    group, options = (
        make_group(np.random.default_rng(0), 0),
        {"path": str(tmp_path), "dtype": "float32", "device": "cpu"},
    )
    given = ScorerConfig(scorer="teacher", columns={"wise": "token"}, options=options)
    found = CustomScorer(given, "wise", 0.5)._score(ScoringTask(("train", 0), group, ("wise",), {}, 0))["wise"]
    np.testing.assert_array_equal(found, Teacher(**options, temperature=0.5).score_group(group, {})["teacher"])
    assert not np.allclose(found, Teacher(**options).score_group(group, {})["teacher"])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), gamma=st.sampled_from([0.0, 0.5, 1.0]))
def test_its_mean_is_the_reverse_divergence_turned(seed: int, gamma: float) -> None:
    torch.manual_seed(seed)
    mask = torch.ones(1, 4, dtype=torch.float64)
    one, two, mine = (torch.log_softmax(torch.randn(5, dtype=torch.float64), -1) for _ in range(3))
    mixed = (3 * one + two) / 4
    total = torch.zeros(1, 4, dtype=torch.float64)
    for tokens in torch.cartesian_prod(*[torch.arange(5)] * 4):
        rows = [part[tokens][None] for part in (one, two, mine)]
        found = distillation(mask * 0, mask, torch.zeros(1), *rows, weights=[0.75, 0.25], gamma=gamma, reward=0.0)
        total += mine[tokens].sum().exp() * found
    divergence = (mine.exp() * (mine - mixed)).sum()
    factors = torch.tensor([sum(gamma**k for k in range(4 - place)) for place in range(4)], dtype=torch.float64)
    torch.testing.assert_close(total[0], -divergence * factors)
    alike = distillation(mask * 0, mask, torch.zeros(1), mine[None, :4], mine[None, :4], weights=[1.0], gamma=gamma,
                         reward=0.0)  # fmt: skip
    assert not alike.any(), "who says the same pulls nowhere"


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), asked=st.lists(st.sampled_from([(1, 1), (1, 0), (0, 1), (0, 0)]), min_size=1))
def test_teachers_of_other_sources_have_no_part_in_a_row(seed: int, asked: list[tuple[int, int]]) -> None:
    torch.manual_seed(seed)
    one, two, mine = (-torch.rand(len(asked), 4) for _ in range(3))
    there = torch.tensor(asked, dtype=torch.bool)
    given_one, given_two = (part.where(there[:, [i]], torch.nan) for i, part in enumerate((one, two)))
    mask, weights = torch.ones(len(asked), 4), {"weights": [0.75, 0.5]}
    found = distillation(mask * 0, mask, mask[:, 0], given_one, given_two, mine, **weights, gamma=0.0, reward=0.0)
    for row, both in enumerate(asked):
        parts = [(w, part[row]) for w, part, yes in zip((0.75, 0.5), (one, two), both, strict=True) if yes]
        said = sum(w * part for w, part in parts) / sum(w for w, _ in parts) if parts else mine[row]
        torch.testing.assert_close(found[row], said - mine[row])


@pytest.mark.parametrize("kind", ["grpo", "rloo", "reinforce_plus_plus", "none"])
def test_teachers_add_to_any_advantage_what_they_find_likelier(kind: str) -> None:
    """A − c (log μ − log π_teacher), the reverse divergence's estimate, token by token; before it is whitened."""
    step, random = a_step(0), np.random.default_rng(1)
    said = {name: [random.normal(-2, 1, len(t.tokens)).astype(np.float32) for t in step.trajectories] for name in "ab"}
    said["b"][3][:] = np.nan  # of another source
    step = replace(step, token_values=said)
    term = {"teachers": {"a": 0.75, "b": 0.25}, "coefficient": 0.5}

    def found(**more: object) -> tuple[torch.Tensor, dict[str, float]]:
        algorithm = {"advantage": {"type": kind}, "imitate": {"coefficient": 0.1}, **more}
        return Learner(a_model(), TrainerConfig.model_validate({"algorithm": algorithm}), 1.0)._advantages(step)

    (plain, _), (with_it, metrics) = found(), found(teacher_advantage=term)
    total = 0.0
    for row, trajectory in enumerate(step.trajectories):
        size, mask = len(trajectory.tokens), trajectory.loss_mask
        mean = said["a"][row] if row == 3 else 0.75 * said["a"][row] + 0.25 * said["b"][row]
        reverse = (trajectory.logprobs - mean) * mask
        wanted = plain[row, :size].numpy() - 0.5 * reverse
        np.testing.assert_allclose(with_it[row, :size].numpy(), wanted, atol=1e-5)
        total += reverse.sum()
    assert metrics["teacher_kl"] == pytest.approx(total / sum(t.sampled for t in step.trajectories), rel=1e-4)
    assert not np.allclose(total, 0)
    white, _ = found(teacher_advantage=term, whiten=True)
    torch.testing.assert_close(white, _whitened(with_it, step), atol=1e-4, rtol=1e-4)


def _whitened(values: torch.Tensor, step: TrainingBatch) -> torch.Tensor:
    mask = step.padded([t.loss_mask for t in step.trajectories], range(len(step.trajectories))).bool()
    return torch.where(mask, (values - values[mask].mean()) / values[mask].std(), 0.0)


def test_equal_groups_teach_where_a_teacher_adds_to_the_advantage() -> None:
    term = {"teacher_advantage": {"teachers": {"a": 1.0}}}
    assert AlgorithmConfig().equal_is_idle and not AlgorithmConfig.model_validate(term).equal_is_idle
    none = {"advantage": {"type": "none"}}
    assert AlgorithmConfig.model_validate(none | term).learns_from_sampled
    with pytest.raises(ValidationError, match="of a given answer it said nothing; set given.compared to false"):
        AlgorithmConfig.model_validate(term | {"given": {"compared": True}})
    with pytest.raises(ValidationError, match="teacher_advantage: it tells tokens apart"):
        AlgorithmConfig.model_validate(term | {"loss": {"type": "geo_mean"}})
