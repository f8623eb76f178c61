"""Role-conditioned advantages: each role is compared with its own past, also after a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.config import ConfigError, load
from penstock.protocols.columns import REWARD
from penstock.protocols.experience import Prompt
from penstock.services.learning import checkpoint
from penstock.services.learning.batch import TrainingBatch
from penstock.services.learning.config import CheckpointConfig
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from penstock.services.trainer.running_baseline import roles_of, running_baselines
from tests.trainer.rank_program import a_model
from tests.trainer.steps import Tokenizer, a_step

RAE = {"type": "rae", "role": "reward/role", "decay": 0.5}


@given(
    played=st.lists(st.tuples(st.floats(-1, 1), st.sampled_from("ab")), min_size=1, max_size=30),
    decay=st.sampled_from([0.0, 0.5, 0.95]), cut=st.integers(0, 30),
)  # fmt: skip
def test_a_baseline_follows_its_own_role_however_steps_are_cut(
    played: list[tuple[float, str]], decay: float, cut: int
) -> None:
    state: dict[str, float] = {}
    found = [
        value
        for part in (played[:cut], played[cut:])
        for value in running_baselines([r for r, _ in part], [p for _, p in part], range(len(part)), decay, state)
    ]
    for place, (_, role) in enumerate(played):
        mine = [reward for reward, other in played[: place + 1] if other == role]
        wanted = sum((1 - decay) * decay ** (len(mine) - 1 - i) * reward for i, reward in enumerate(mine))
        assert found[place] == pytest.approx(wanted, abs=1e-9)


def test_branches_of_a_session_are_one_answer() -> None:
    state: dict[str, float] = {}
    found = running_baselines([0.0, 2.0, 1.0], ["a", "a", "b"], [0, 0, 0], 0.5, state)
    assert found.tolist() == [0.5, 0.5, 0.5] and state == {"baseline/a": 0.5, "baseline/b": 0.5}


def a_game(seed: int) -> TrainingBatch:
    """Whose first player nearly always wins."""
    step = a_step(seed)
    roles = np.arange(12) % 2
    rewards = np.where(roles == 0, 0.75, -0.75).astype(np.float32)
    return replace(step, values={REWARD: rewards, "reward/role": roles.astype(np.float32)})


def test_who_wins_by_going_first_is_no_better_for_it(tmp_path: Path) -> None:
    def learner() -> Learner:
        return Learner(a_model(), TrainerConfig.model_validate({"algorithm": {"advantage": RAE}}), 1.0)

    one, again = learner(), learner()
    for seed in range(3):
        metrics = one.train(a_game(seed))
    assert metrics["baseline/0"] == pytest.approx(0.75, abs=1e-4) == -metrics["baseline/1"]
    worth, _ = one._advantages(a_game(3))
    assert worth.abs().max() < 1e-4, "though one side has 0.75, and the other -0.75"
    saver = checkpoint.Saver(one, Tokenizer(), tmp_path, CheckpointConfig(keep=1))
    path = saver.begin().result()
    saver.close()
    checkpoint.restore(again, path)
    assert again.state == one.state
    torch.testing.assert_close(again._advantages(a_game(4))[0], one._advantages(a_game(4))[0])


def test_a_role_is_of_its_source() -> None:
    step = a_game(0)
    prompts = tuple(Prompt(index=i, text="x", source="chess" if i % 3 else "go") for i in range(12))
    rows = np.array([0, 1, 3])
    assert roles_of(replace(step, prompts=prompts), rows, "reward/role") == ["go/0", "chess/1", "go/1"]
    assert roles_of(replace(step, prompts=prompts), rows, None) == ["go", "chess", "go"]
    assert roles_of(step, rows, None) == ["all"] * 3
    played = [replace(t, metrics={"branch": i % 2}) if i else t for i, t in enumerate(step.trajectories)]
    assert roles_of(replace(step, trajectories=played), rows, "agent/branch") == ["all", "1", "1"]


def test_a_role_that_nobody_writes_is_named() -> None:
    quickstart = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    with pytest.raises(ConfigError, match="advantage.columns: no scorer writes a column 'reward/role'"):
        load(quickstart, ["trainer.algorithm={preset: spiral, advantage: {role: reward/role}}"])
