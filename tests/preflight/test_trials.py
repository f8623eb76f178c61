"""What is tried before a run is handed what it gets in one."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.pipeline.config import Config
from penstock.pipeline.preflight import rewards
from penstock.pipeline.preflight.report import Report
from penstock.pipeline.preflight.reward_notes import TRUTH, left_out
from penstock.protocols.columns import ColumnTable
from penstock.protocols.experience import Prompt
from penstock.services.data.picture_files import open_picture
from penstock.services.reward.config import FunctionConfig
from penstock.services.reward.function import OFFERED


def test_a_reward_may_ask_for_the_same_by_name_in_its_trial() -> None:
    offered = rewards._offered(FunctionConfig(), ColumnTable(columns=()), Prompt(index=0, text="1+1="), "2")
    assert offered.keys() == set(OFFERED)


def test_a_part_of_the_truth_is_not_all_that_verls_and_trls_functions_are_told_of_in_their_trial() -> None:
    row = {"level": 1, "right": {"answer": "a"}, "answer": "a", "extra_info": {"level": 2}}
    prompt = Prompt(index=0, messages=[{"role": "user", "content": "say"}], truth=row, source="math")
    of_verl = {"function": "tests.reward.functions:compute_score", "truth_key": "right.answer"}
    of_trl = {"function": "tests.reward.functions:of_trl", "truth_key": "right.answer", "whole_group": True}
    told = {
        "model": {"type": "tiny"},
        "prompts": {"train": {"type": "sort"}},
        "reward": {"functions": [of_verl, of_trl]},
    }
    report = Report(rows={"math": prompt})
    rewards.look(Config.model_validate(told), report)
    assert (
        not report.problems and "gave 3 for the truth" in report.lines[0] and "gave 1 for the truth" in report.lines[1]
    )


def of_verl(solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, float]:
    """As verl's math_dapo judges, of a row that says how much more it is worth."""
    right = solution_str == ground_truth
    return {"score": (1.0 if right else -1.0) * extra_info.get("worth", 1), "acc": right}


def noted(function: dict[str, Any], row: Prompt, **more: Any) -> list[str]:
    """What one should know of a function that works."""
    train = {"type": "hub", "path": "json", "files": ["rows.jsonl"], "truth_key": "answer"}
    told = {"model": {"type": "tiny"}, "prompts": {"train": train}, "reward": {"functions": [function]}} | more
    report = Report(rows={"": row})
    rewards.look(Config.model_validate(told), report)
    assert not report.problems
    return report.notes


OF_VERL = {"function": f"{__name__}:of_verl", "name": "dapo", "also": {"acc": 0}}
ROW = Prompt(index=0, text="1+1=", truth={"answer": "2", "extra_info": {}})


RANGE = {"replay": {"filter": {"type": "range"}}}


@pytest.mark.parametrize(
    ("weight", "rule", "said"),
    [
        (1, {}, "replay.filter.low=0: reward was -1 when it was tried"),
        (2, {"column": "reward/dapo"}, "set replay.filter.low=-1, or filter by a column"),
        (1, {"low": -1}, ""),
        (1, {"column": "reward/dapo.acc"}, ""),
        (1, {"type": "zero_variance"}, ""),
        (3, {"low": -3}, "replay.filter.high=1: reward was 5 when it was tried"),
    ],
)
def test_a_filter_that_leaves_out_what_is_half_right_is_told_of(weight: int, rule: dict[str, Any], said: str) -> None:
    function = FunctionConfig.model_validate(OF_VERL | {"weight": weight, "also": {"acc": weight - 1}})
    told = {"model": {"type": "tiny"}, "prompts": {"train": {"type": "sort"}}, "reward": {"functions": [function]}}
    config = Config.model_validate(told | {"replay": {"filter": RANGE["replay"]["filter"] | rule}})
    gave = {("", TRUTH): [1.0, 1.0], ("", rewards.ANSWER): [-1.0, 0.0]}
    notes = [*left_out(config, [(function, gave)])]
    assert len(notes) == bool(said) and all(said in note for note in notes)
    assert not [*left_out(config, [(function, {("", rewards.ANSWER): [-1.0, 0.0]})])], "nobody knows what is right"


def test_a_punishment_that_no_answer_is_long_enough_for_is_told_of() -> None:
    function = {"function": "overlong", "options": {"longest": 64, "buffer": 16}}
    sampling = {"rollout": {"sampling": {"max_new_tokens": 56}, "engine": {"type": "torch", "max_length": 128}}}
    (note,) = noted(function, ROW, **sampling)
    assert (
        "longest=64: an answer has rollout.sampling.max_new_tokens=56 at most, so that the punishment ends at -0.5"
        in note
    )
    sampling["rollout"]["sampling"]["max_new_tokens"] = 64
    assert not noted(function, ROW, **sampling)


def of_pictures(response: str, pictures: list[bytes]) -> float:
    """As docs/scoring.md opens one."""
    return float(open_picture(pictures[0]).width)


def test_a_reward_that_asks_for_what_agents_show_is_shown_a_blank_picture() -> None:
    told = {
        "model": {"type": "tiny"}, "prompts": {"train": {"type": "sort"}}, "gateway": {"count": 1, "pictures": True},
        "reward": {"functions": [{"function": "tests.preflight.test_trials:of_pictures"}]},
    }  # fmt: skip
    report = Report(rows={"": Prompt(index=0, text="1+1=")})
    rewards.look(Config.model_validate(told), report)
    assert not report.problems and "gave 64 for" in report.lines[0]
