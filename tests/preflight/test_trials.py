"""What is tried before a run is handed what it gets in one."""

from __future__ import annotations

from penstock.pipeline.config import Config
from penstock.pipeline.preflight import rewards
from penstock.pipeline.preflight.report import Report
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
