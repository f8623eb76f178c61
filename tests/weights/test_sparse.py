"""Changes between two versions: lossless, and small where few elements move; nothing but a list of them is applied."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.services.weights import delta

words = st.integers(0, 400).flatmap(
    lambda size: st.tuples(hnp.arrays(np.uint16, size), hnp.arrays(np.uint16, size), hnp.arrays(np.bool_, size))
)


def test_every_16_bit_float_has_its_own_place_in_the_order() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    places = delta._ordered(bits)
    assert (delta._unordered(places) == bits).all() and len(np.unique(places)) == 65536
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    finite = np.isfinite(values)
    assert (np.diff(values[finite][np.argsort(places[finite])]) >= 0).all()


@given(words)
@settings(max_examples=300)
def test_what_is_applied_is_bit_for_bit_the_new_version(case: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    old, other, chosen = case
    new = np.where(chosen, other, old)
    encoded = delta.encode(old.view(np.uint8), new.view(np.uint8))
    if encoded is None:
        return
    assert delta.changes_in(encoded) == int((old != new).sum())
    found = old.copy()
    delta.apply(encoded, found.view(np.uint8))
    assert (found == new).all()


@pytest.mark.parametrize(("density", "moves"), [(0.0, 1), (0.001, 1), (0.01, 1), (0.01, 40), (0.02, 3000), (0.2, 1)])
def test_large_buckets(density: float, moves: int) -> None:
    dice = np.random.default_rng(1)
    old = dice.integers(0, 65536, 1 << 20, dtype=np.uint16)
    new = old.copy()
    chosen = dice.random(len(old)) < density
    new[chosen] += dice.integers(1, moves + 1, int(chosen.sum())).astype(np.uint16)
    encoded = delta.encode(old.view(np.uint8), new.view(np.uint8))
    assert encoded is not None and len(encoded) <= 16 + 7 * chosen.sum()
    delta.apply(encoded, old.view(np.uint8))
    assert (old == new).all()


def test_a_version_that_is_new_altogether_is_not_encoded() -> None:
    dice = np.random.default_rng(2)
    old, new = dice.integers(0, 256, (2, 4096), dtype=np.uint8)
    assert delta.encode(old, new) is None


@given(st.binary(max_size=80))
def test_other_bytes_are_refused_or_change_elements_and_nothing_else(data: bytes) -> None:
    bucket = np.zeros(64, np.uint8)
    try:
        delta.apply(data, bucket)
    except delta.EncodingError:
        pass
