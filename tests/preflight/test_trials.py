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
