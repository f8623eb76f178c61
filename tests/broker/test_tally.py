"""What is counted of reward calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from penstock.pipeline.config import Config
from penstock.pipeline.report.findings import findings
from penstock.protocols.columns import Column, ColumnTable
from penstock.services.broker.status import failures, rewards
from penstock.services.broker.tally import KINDS, Tally


def test_failures_are_counted_by_what_happened() -> None:
    tally = Tally()
    tally.add(8, ["judge timed out after 10 s", "judge raised KeyError: 'a'", "judge raised KeyError: 'b'"])
    tally.add(8, ["judge crashed with exit code 3"])
    assert tally.words() == "4 of 16 calls failed: 2 raised KeyError, 1 timed out, 1 crashed"
    assert Tally(**tally.row()) == tally and tally.last == "judge crashed with exit code 3"


def test_what_agents_have_given_up_is_told_as_theirs() -> None:
    tally = Tally()
    tally.add(40, ["environment given out 3 times (gateway.attempts): ValueError: a bug in my agent"] * 2)
    column = Column(name="reward/environment", scorer="reward", nullable=True, source="reward environment")
    state: Any = SimpleNamespace(
        settings=SimpleNamespace(agents=True, columns=ColumnTable(columns=(column,), sums=())),
        progress=SimpleNamespace(tallies={column.name: tally}, scorer_gauges={}),
    )
    why = "given out 3 times (gateway.attempts)"
    said = f"agents: 2 of 40 sessions gave no reward: 2 {why}; the last: {why}: ValueError: a bug in my agent"
    assert failures(state) == [said]
    of_run = {"rewards": rewards(state), "phase": "done", "step": 1, "steps": 1}
    totals = {"trained": 1, "groups_without_variance": 0, "eval_unusable": 0}
    config = Config.model_validate({"model": {"type": "tiny"}, "prompts": {"train": {"type": "sort"}}})
    assert findings(config, of_run | {"totals": totals}, [{"grad_norm": 1.0}], []) == [said]


def test_what_a_function_says_reaches_no_terminal_as_it_is() -> None:
    tally = Tally()
    tally.add(1, ["judge raised Odd\x1b[2J: a\n\tb\x07\x9b\udc80"])
    assert tally.last == r"judge raised Odd\x1b[2J: a b\x07\x9b\udc80" and tally.last.isprintable()
    assert tally.words() == r"1 of 1 calls failed: 1 raised Odd\x1b[2J"


def test_a_function_with_a_thousand_errors_has_few_kinds() -> None:
    tally = Tally()
    for number in range(1000):
        tally.add(1, [f"judge raised Error{number}: x"])
    assert len(tally.kinds) == KINDS + 1 and tally.failed == 1000 and "other" in tally.words()
