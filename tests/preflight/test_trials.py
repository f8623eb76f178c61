"""What is tried before a run is handed what it gets in one."""

from __future__ import annotations

from penstock.pipeline.preflight import rewards
from penstock.protocols.columns import ColumnTable
from penstock.protocols.experience import Prompt
from penstock.services.reward.config import FunctionConfig
from penstock.services.reward.function import OFFERED


def test_a_reward_may_ask_for_the_same_by_name_in_its_trial() -> None:
    offered = rewards._offered(FunctionConfig(), ColumnTable(columns=()), Prompt(index=0, text="1+1="), "2")
    assert offered.keys() == set(OFFERED)
