"""What the sampler chose tokens from, as a forward pass has it: padded for few tokens at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocols.experience import Trajectory
from penstock.services.modeling import logprobs as module
from penstock.services.modeling.candidates import Candidates
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from tests.conftest import make_group, with_candidates
from tests.trainer.rank_program import a_model

CPU = torch.device("cpu")


def recorded(seed: int, count: int = 4) -> list[Trajectory]:
    random = np.random.default_rng(seed)
    return [with_candidates(random, each) for each in make_group(random, 0, count).trajectories]


def naive(trajectories: list[Trajectory]) -> list[list[int]]:
    """Of each sampled token, in order."""
    found = []
    for trajectory in trajectories:
        ends = np.cumsum(trajectory.candidate_counts)
        for token in np.flatnonzero(trajectory.loss_mask):
            count = trajectory.candidate_counts[token]
            found.append(trajectory.candidate_ids[ends[token] - count : ends[token]].tolist())
    return found


def rows(table: torch.Tensor) -> list[list[int]]:
    return [[number for number in row if number >= 0] for row in table.tolist()]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), size=st.integers(1, 9))
def test_a_table_is_of_its_own_tokens(seed: int, size: int) -> None:
    trajectories = recorded(seed)
    every = Candidates.of(trajectories, CPU)
    assert every is not None
    wanted = naive(trajectories)
    assert rows(every.table()) == wanted
    parts = every.split(size)
    assert [len(part.counts) for part in parts] == [len(part) for part in torch.arange(len(wanted)).split(size)]
    assert [row for part in parts for row in rows(part.table())] == wanted
    some = np.random.default_rng(seed).permutation(len(wanted))[: max(1, len(wanted) // 2)]
    assert rows(every.chosen(some).table()) == [wanted[place] for place in some]


def test_one_undecided_token_does_not_widen_a_steps_rows() -> None:
    """A plan holds what was recorded, however many candidates one token has."""
    trajectories = []
    for seed in range(16):
        one = recorded(seed, 1)[0]
        counts = np.where(one.loss_mask == 1, 1, 0).astype(np.int32)
        counts[-1] = 5000
        ids = np.concatenate([one.tokens[(one.loss_mask == 1)][:-1], np.arange(5000)]).astype(np.int32)
        given: dict[str, Any] = {"candidate_counts": counts, "candidate_ids": ids}
        trajectories.append(Trajectory(one.tokens, one.loss_mask, one.logprobs, one.versions, "", "stop", **given))
    learner = Learner(a_model(), TrainerConfig(), 1.0)
    held = [each.rows().candidates for each, _ in learner.plan(trajectories, np.arange(16))]
    assert sum(each.ids.nbytes for each in held if each) == sum(t.candidate_ids.nbytes for t in trajectories)


def test_numbers_do_not_depend_on_how_many_tokens_a_table_has(monkeypatch: pytest.MonkeyPatch) -> None:
    model, trajectories = a_model(), recorded(1)
    learner = Learner(model, TrainerConfig(), 1.0)
    found = []
    for tokens in (1000, 2):
        monkeypatch.setattr(module, "LOGIT_BYTES", 4 * model.config.vocab_size * tokens)
        ((one, _),) = learner.plan(trajectories, np.zeros(len(trajectories), np.int64))
        values = module.logprobs(model, one.rows(), 1.0)
        found.append((values.detach(), torch.autograd.grad(values.sum(), model.lm_head.weight)[0]))
    torch.testing.assert_close(found[0], found[1])
