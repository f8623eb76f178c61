"""What is counted of reward calls."""

from __future__ import annotations

from penstock.services.broker.tally import KINDS, Tally


def test_failures_are_counted_by_what_happened() -> None:
    tally = Tally()
    tally.add(8, ["judge timed out after 10 s", "judge raised KeyError: 'a'", "judge raised KeyError: 'b'"])
    tally.add(8, ["judge crashed with exit code 3"])
    assert tally.words() == "4 of 16 calls failed: 2 raised KeyError, 1 timed out, 1 crashed"
    assert Tally(**tally.row()) == tally and tally.last == "judge crashed with exit code 3"


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
