"""What is kept as long as there is room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.services.runtime.kept import Kept


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 30))
def test_those_that_were_asked_for_last_are_kept(asked: list[int], most: int) -> None:
    kept: Kept[bytes] = Kept(most, len)
    last: list[int] = []
    for key in asked:
        made: list[int] = []

        def make(key: int = key, made: list[int] = made) -> bytes:
            made.append(key)
            return bytes(key)

        assert kept.get(key, make) == bytes(key)
        assert bool(made) == (key not in last)
        last = [*(other for other in last if other != key), key]
        while sum(last) > most and len(last) > 1:
            del last[0]
    kept.clear()
    assert kept.get(3, lambda: b"new") == b"new"
