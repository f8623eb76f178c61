"""What reward functions are handed: the last turn, the truth of a table, an evaluation's source."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import pytest

from penstock.protocols.experience import UNSAMPLED, Group, Prompt, Trajectory
from penstock.services.reward.config import RewardConfig
from penstock.services.reward.service import Reward
from penstock.services.reward.truth import as_text
from penstock.services.runtime.scorer import ScoringTask

HERE = __name__
SAID = ("let me look", "42")


def length(response: str) -> float:
    return len(response)


def level(truth: dict[str, Any]) -> float:
    return truth.get("extra_info", truth)["level"]


@pytest.mark.parametrize(
    ("function", "given"),
    [
        ({"function": "exact_match"}, 1.0),
        ({"function": "number"}, 1.0),
        ({"function": "exact_match", "last_turn": False}, 0.0),
        ({"function": f"{HERE}:length"}, len("let me look 7 7 42")),
        ({"function": f"{HERE}:length", "last_turn": True}, 2.0),
        ({"function": f"{HERE}:length", "own_words": True}, len("let me look\n\n42")),
        ({"function": "exact_match", "own_words": True}, 0.0),
        ({"function": "regex", "options": {"pattern": "7"}}, 0.0),
        ({"function": "regex", "options": {"pattern": "look.42"}, "own_words": False}, 0.0),
        ({"function": "regex", "options": {"pattern": "look..42"}}, 1.0),
        ({"function": "regex", "options": {"pattern": "look"}, "last_turn": True}, 0.0),
        ({"function": "repetition", "options": {"words": 1}}, 0.0),
        ({"function": "exact_match", "truth_key": "reward_model.ground_truth"}, 1.0),
        ({"function": f"{HERE}:level"}, 3.0),
        ({"function": f"{HERE}:level", "truth_key": "extra_info"}, 3.0),
        ({"function": "tests.reward.functions:compute_score", "truth_key": "reward_model.ground_truth"}, 3.0),
        ({"function": "tests.reward.functions:compute_score", "last_turn": True}, 1.0),
        ({"function": "tests.reward.functions:counts_turns", "truth_key": "reward_model.ground_truth"}, 34.0),
        ({"function": "tests.reward.functions:counts_turns"}, 4.0),
        ({"function": "tests.reward.functions:counts_no_turns", "truth_key": "", "whole_group": True}, 30.0),
    ],
)
def test_each_reads_its_turns_and_its_part_of_the_truth(function: dict[str, Any], given: float) -> None:
    mask, zeros = np.array([0, 1, 0, 1], np.uint8), np.zeros(4, np.float32)
    versions = np.where(mask == 1, 0, UNSAMPLED).astype(np.int32)
    answer = Trajectory(
        np.arange(4, dtype=np.int32), mask, zeros, versions, text="let me look 7 7 42", finish="stop", turns=SAID
    )
    config = RewardConfig.model_validate({"functions": [function]})
    reward, told = Reward(config, workers=1, group_size=1), queue.Queue[Any]()
    (column,) = (each.column for each in config.functions)
    try:
        row = {"reward_model": {"ground_truth": "42"}, "extra_info": {"level": 3}}
        truth = row if "level" in function["function"] or "truth_key" in function else "42"
        task = ScoringTask(
            ("train", 1), Group(1, Prompt(index=0, text="?", truth=truth, source="math"), [answer]), (column,), {}, 0
        )
        reward.score([task], lambda task, name, values, errors=(): told.put((values, errors)))
        values, errors = told.get(timeout=30)
    finally:
        reward.close()
    assert values.tolist() == [given] and not errors


@pytest.mark.parametrize(
    ("truth", "text"),
    [(3.0, "3"), (4.5, "4.5"), (-0.0, "0"), (7, "7"), ("3.0", "3.0")],
)
def test_a_whole_number_is_one_though_its_column_has_fractions(truth: Any, text: str) -> None:
    assert as_text(truth) == text
