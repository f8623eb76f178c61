"""What others have written, made fit for a terminal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.services.runtime.plain import plain, visible
from penstock.services.runtime.plugins import describe


@given(st.text() | st.text(st.characters(categories=["Cc", "Cs"])))
def test_no_terminal_obeys_it(text: str) -> None:
    line = plain(text)
    line.encode()
    assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in line) and line == plain(line)
    assert visible(text).count("\n") == text.count("\n")


def test_what_can_be_read_stays_as_it_is() -> None:
    assert plain("naïve 😀:\tsum of\n 2") == "naïve 😀: sum of 2"
    assert visible("a\x1b[31m\r\n\tb") == "a\\x1b[31m\\r\n\tb"
    assert describe(ValueError("red \x1b[31m\nhat")) == r"ValueError: red \x1b[31m hat"
