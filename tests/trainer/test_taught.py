"""A teacher's whole distribution: what its scorer writes of it, how it travels, and where it draws the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocols.columns import REWARD, Column, ColumnError, ColumnTable, WeightedSum, top_columns
from penstock.protocols.experience import as_bytes
from penstock.protocols.messages import Batch, TakenGroup
from penstock.protocols.packed_groups import pack_group
from penstock.protocols.wire import pack, unpack
from penstock.services.learning.batch import open_batch
from penstock.services.modeling import logprobs
from penstock.services.modeling.packing import plan_rows
from penstock.services.modeling.parallel.fsdp import forward_statistics
from penstock.services.modeling.parallel.world import World
from penstock.services.modeling.taught import Taught, Top
from penstock.services.modeling.teacher import Teacher
from penstock.services.trainer.algorithms.divergence import divergence
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from penstock.services.trainer.rank_setup import load_policy
from tests.conftest import make_group
from tests.trainer.rank_program import a_model
from tests.trainer.steps import a_step, gradient

KINDS = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 0.1), ("mixed", 0.3)]
VOCABULARY = 9


def by_hand(p: np.ndarray, q: np.ndarray, kind: str, beta: float) -> np.ndarray:
    """float64 ``[tokens]``, from probabilities ``[tokens, outcomes]``."""
    m = beta * p + (1 - beta) * q
    forward, reverse, p_m, q_m = ((a * np.log(a / b)).sum(-1) for a, b in ((p, q), (q, p), (p, m), (q, m)))
    of_two = {"jsd": beta * p_m + (1 - beta) * q_m, "mixed": beta * forward + (1 - beta) * reverse}
    return (of_two | {"forward_kl": forward, "reverse_kl": reverse})[kind]


def cut(probabilities: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Those of ``ids``, and of all others together."""
    top = np.take_along_axis(probabilities, ids, -1)
    return np.concatenate([top, 1 - top.sum(-1, keepdims=True)], -1)


def told(p: np.ndarray, ids: np.ndarray, weight: float = 1.0) -> Top:
    """By a teacher that says ``p`` ``[tokens, outcomes]``, in float64."""
    return Top(torch.from_numpy(ids.astype(np.int32)), torch.from_numpy(np.log(p)), weight)


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def distance(logits: torch.Tensor, *tops: Top, kind: str = "forward_kl", beta: float = 0.5) -> torch.Tensor:
    return Taught(tops, partial(divergence, kind=kind, beta=beta)).divergence(logits, logits.logsumexp(-1))


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), k=st.sampled_from([1, 4, VOCABULARY - 1, VOCABULARY]))
def test_a_divergence_is_what_its_formula_says_by_hand(kind: str, beta: float, seed: int, k: int) -> None:
    random = np.random.default_rng(seed)
    scores, logits = (random.normal(0, 2, (4, VOCABULARY)) for _ in range(2))
    ids = np.argsort(-scores, -1)[:, :k]
    p, q = softmax(scores), softmax(logits)
    mine, its = (p, q) if k == VOCABULARY else (cut(p, ids), cut(q, ids))
    said = np.concatenate([np.take_along_axis(p, ids, -1), np.full((4, 1), 1e-300)], -1) if k == VOCABULARY else mine
    leaf = torch.from_numpy(logits).requires_grad_()
    found = distance(leaf, told(said, ids), kind=kind, beta=beta)
    np.testing.assert_allclose(found.detach().numpy(), by_hand(mine, its, kind, beta), atol=1e-12, rtol=1e-9)
    assert torch.autograd.gradcheck(lambda x: distance(x, told(said, ids), kind=kind, beta=beta), leaf)
    if kind == "forward_kl" and k == VOCABULARY:
        (slope,) = torch.autograd.grad(found.sum(), leaf)
        np.testing.assert_allclose(slope.numpy(), q - p, atol=1e-12)  # of logits: what the policy says too much


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_a_generalised_divergence_goes_as_either_one_at_its_ends(seed: int) -> None:
    random = np.random.default_rng(seed)
    one, other = (torch.from_numpy(random.normal(0, 1, (3, 5))).log_softmax(-1) for _ in range(2))
    near = 1e-6
    for kind, beta, share in (("forward_kl", near, near), ("reverse_kl", 1 - near, near)):
        wanted = divergence(one, other, kind, 0.5)
        torch.testing.assert_close(divergence(one, other, "jsd", beta) / share, wanted, rtol=1e-3, atol=1e-4)
    assert (divergence(one, other, "jsd", 0.5) <= np.log(2)).all()
    torch.testing.assert_close(divergence(one, one, "jsd", 0.5), torch.zeros(3, dtype=torch.float64))


def test_teachers_that_are_not_asked_have_no_part_and_nor_have_tokens_that_the_policy_has_not() -> None:
    random = np.random.default_rng(0)
    ids = np.stack([random.permutation(VOCABULARY)[:3] for _ in range(3)])
    one, two = (told(softmax(random.normal(0, 1, (3, 4))), ids, weight) for weight in (0.75, 0.5))
    logits = torch.from_numpy(random.normal(0, 1, (3, VOCABULARY))).requires_grad_()
    alone = [distance(logits, top) for top in (one, two)]
    there = torch.tensor([[True, True], [True, False], [False, False]])
    for top, asked in zip((one, two), there.T, strict=True):
        top.logs[~asked] = torch.nan
    found = distance(logits, one, two)
    wanted = torch.stack([(0.75 * alone[0][0] + 0.5 * alone[1][0]) / 1.25, alone[0][1], torch.zeros(())])
    torch.testing.assert_close(found, wanted)
    (slope,) = torch.autograd.grad(found.sum(), logits)
    assert slope.isfinite().all() and not slope[2].any()
    ids[:, 1] = VOCABULARY + 1  # a vocabulary padded further
    known = softmax(random.normal(0, 1, (3, 4)))
    without = np.delete(known, 1, -1) / (1 - known[:, [1]])
    same = distance(logits, told(without, np.delete(ids, 1, -1)), kind="jsd")
    torch.testing.assert_close(distance(logits, told(known, ids), kind="jsd"), same)


@pytest.mark.parametrize("k", [4, 51])
def test_a_teacher_says_which_tokens_it_finds_likeliest(k: int, tmp_path: Path) -> None:
    model = a_model().eval()
    model.save_pretrained(tmp_path)
    group = make_group(np.random.default_rng(0), 0)
    teacher = Teacher(str(tmp_path), column="wise", dtype="float32", device="cpu", temperature=0.7, top_k=k)
    found = teacher.score_group(group, {})
    ids, logs = top_columns("wise", k, "wise")
    sizes = len(group.trajectories), len(found["wise"]), group.sampled
    for column in (ids, logs):
        column.check(found[column.name], *sizes)
    plain = Teacher(str(tmp_path), column="wise", dtype="float32", device="cpu", temperature=0.7).score_group(group, {})
    assert plain.keys() == {"wise"}
    np.testing.assert_allclose(found["wise"], plain["wise"], atol=1e-6)
    start = 0
    for trajectory in group.trajectories:
        tokens = torch.from_numpy(trajectory.tokens.astype(np.int64))[None]
        every = torch.log_softmax(model(tokens).logits[0, :-1].double() / 0.7, -1)[trajectory.loss_mask[1:] == 1]
        mine = slice(start, start + trajectory.sampled)
        said = found[ids.name].reshape(-1, k)[mine], found[logs.name].reshape(-1, k + 1)[mine]
        best = every.topk(k)
        assert np.array_equal(said[0], best.indices.numpy())
        np.testing.assert_allclose(said[1][:, :-1], best.values.detach().numpy(), rtol=1e-3, atol=1e-3)
        rest = 1 - best.values.exp().sum(-1).detach().numpy()
        np.testing.assert_allclose(np.exp(said[1][:, -1].astype(float)), rest.clip(0), rtol=2e-3, atol=1e-6)
        start = mine.stop


def learner(budget: int = 100_000, more: Mapping[str, Any] = MappingProxyType({}), **distill: Any) -> Learner:
    algorithm = {"preset": "gkd", "distill": distill, **more} if distill else {}
    config = {"algorithm": algorithm, "tokens_per_micro_batch": budget}
    return Learner(a_model(), TrainerConfig.model_validate(config), 0.7)


@pytest.mark.parametrize(("budget", "chunk"), [(64, 7), (100_000, 10_000)])
@pytest.mark.parametrize(("kind", "beta"), KINDS[:3])
def test_the_term_is_the_mean_over_all_tokens_by_plain_transformers(
    kind: str, beta: float, budget: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "LOGIT_BYTES", 4 * 51 * chunk)
    step, plain = a_step(0), learner()
    one = learner(budget, divergence=kind, beta=beta, coefficient=0.5)
    total, count = torch.zeros(()), 0
    for trajectory, (ids, logs) in zip(step.trajectories, step.tops["teacher"], strict=True):
        tokens = torch.from_numpy(trajectory.tokens.astype(np.int64))[None]
        q = (plain.model(tokens).logits[0, :-1] / 0.7).softmax(-1)[trajectory.loss_mask[1:] == 1]
        top = q.gather(-1, torch.from_numpy(ids).long())
        q = torch.cat([top, 1 - top.sum(-1, keepdim=True)], -1)
        p = torch.from_numpy(logs).float().softmax(-1)
        m = beta * p + (1 - beta) * q
        kls = [(a * (a / b).log()).sum() for a, b in ((p, q), (q, p), (p, m), (q, m))]
        total = total + {"forward_kl": kls[0], "reverse_kl": kls[1], "jsd": beta * kls[2] + (1 - beta) * kls[3]}[kind]
        count += trajectory.sampled
    term = torch.autograd.grad(0.5 * total / count, list(plain.parameters.values()))
    found, metrics = one.accumulate(step)
    assert metrics["teacher_divergence"] == pytest.approx(float(total.detach()) / count, rel=1e-4)
    assert found == pytest.approx(0.5 * metrics["teacher_divergence"], rel=1e-5)
    for mine, its in zip(gradient(one), term, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize(("budget", "every"), [(64, 3), (100_000, 3), (64, 1)])
def test_rows_answers_are_taught_as_the_policys_own_are(budget: int, every: int) -> None:
    """With answers of rows among its own, or of rows alone, the term is the same mean over all of them."""
    step, same = a_step(0, given=every), a_step(0, given=every)
    same.trajectories[:] = [
        replace(t, given=False, logprobs=(-0.5 * t.loss_mask).astype(np.float32)) for t in same.trajectories
    ]
    distill = {"divergence": "jsd", "beta": 0.3, "coefficient": 0.5}
    own, mixed = learner(budget, **distill), learner(budget, {"given": {"shape": "distill"}}, **distill)
    wanted, found = own.accumulate(same), mixed.accumulate(step)
    assert found[0] == pytest.approx(wanted[0], rel=1e-5) and found[1]["given_nll"] > 0
    assert found[1]["teacher_divergence"] == pytest.approx(wanted[1]["teacher_divergence"], rel=1e-5)
    for mine, its in zip(gradient(mixed), gradient(own), strict=True):
        torch.testing.assert_close(mine, its, atol=1e-6, rtol=1e-4)


def test_what_a_teacher_says_arrives_as_it_was_and_of_another_size_costs_its_group() -> None:
    random, k = np.random.default_rng(0), 3
    ids, logs = top_columns("wise", k, "wise", sources=("taught",))
    table = ColumnTable(
        columns=(Column(name="reward/a", scorer="reward"), Column(name="wise", scorer="wise", per="token"), ids, logs),
        sums=(WeightedSum(name=REWARD, terms={"reward/a": 1.0}),),
    )
    assert table.by_token == {"wise"} and table.by_trajectory == {"reward/a", REWARD} and [*table.tops] == ["wise"]
    taken, said = [], []
    for number in range(3):
        group = make_group(random, number)
        source = "" if number == 1 else "taught"
        group.prompt.__dict__["source"] = source
        size, sampled = sum(len(t.tokens) for t in group.trajectories), group.sampled
        values = dict.fromkeys(("reward/a", REWARD), np.ones(4, np.float32)) | {"wise": np.zeros(size, np.float32)}
        if source:  # ids that float32 would round
            values[ids.name] = random.integers(2**24, 2**31 - 1, sampled * k).astype(np.int32)
            values[logs.name] = -random.random(sampled * (k + 1)).astype(np.float16)
        said.append(values)
        kept = {name: v[: -1 if number == 2 and name == ids.name else None] for name, v in values.items()}
        columns = unpack(pack(kept))
        taken.append(TakenGroup(number=number, experience=as_bytes(pack_group(group)), columns=columns))
    with pytest.raises(ColumnError, match=r"3 a sampled token"):
        ids.check(taken[2].columns[ids.name], 4, 0, 99)
    for size, right in ((99 * k, True), (99 * k + 1, False), (100 * k, False)):  # of whom nobody has counted
        values = np.zeros(size, np.int32)
        if right:
            ids.check(values, 4, 99)
            continue
        with pytest.raises(ColumnError, match=r"3 a sampled token"):
            ids.check(values, 4, 99)
    step = open_batch(Batch(step=0, seed=0, max_lag=2, groups=taken, committed=0), table)
    assert step.unreadable == 1 and len(step.tops["wise"]) == 8
    assert [len(part[0]) for part in step.tops["wise"]] == [t.sampled for t in step.trajectories]
    for which, column in enumerate((ids, logs)):
        mine = np.concatenate([part[which] for part in step.tops["wise"][:4]])
        assert mine.dtype == column.dtype and np.array_equal(mine.reshape(-1), said[0][column.name])
    assert all(np.isnan(part[1]).all() for part in step.tops["wise"][4:])


def test_what_teachers_say_comes_to_a_model_that_computes_in_16_bits_as_it_is(tmp_path: Path) -> None:
    """FSDP would round it to what the model computes in."""
    a_model().save_pretrained(tmp_path / "start")
    start, cpu = str(tmp_path / "start"), torch.device("cpu")
    model = load_policy(start, start, World(cpu), "bfloat16", TrainerConfig())
    step = a_step(0)
    rows = next(plan_rows(step.trajectories, step.groups, 10_000, cpu))
    logs = torch.randn(len(rows.target), 4, generator=torch.Generator().manual_seed(0)).log_softmax(-1).half()
    ids, seen = torch.arange(3, dtype=torch.int32).expand(len(logs), 3), []

    def compare(said: torch.Tensor, policy: torch.Tensor) -> torch.Tensor:
        seen.append(said)
        return policy.sum(-1)

    taught = replace(rows, taught=Taught((Top(ids, logs, 1.0),), compare))
    with torch.no_grad():
        forward_statistics(model, taught, 1.0, ("divergence",))
    torch.testing.assert_close(torch.cat(seen), logs.float().log_softmax(-1), rtol=0, atol=1e-6)
