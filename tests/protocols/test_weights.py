"""A version is its bytes: any difference is found, and named."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.weights import DigestError, layout, make_manifest, verify


def version(nbytes: int = 1000, bucket: int = 256) -> tuple[object, bytearray]:
    placed, size = layout(
        [("a", "float32", (nbytes // 8,), nbytes // 2), ("b", "float32", (nbytes // 8,), nbytes // 2)]
    )
    buffer = bytearray(np.random.default_rng(0).bytes(size))
    return make_manifest(placed, memoryview(buffer), bucket), buffer


@given(st.integers(0, 999), st.integers(0, 7))
def test_one_flipped_bit_is_found_and_its_bucket_named(position: int, bit: int) -> None:
    manifest, buffer = version()
    verify(manifest, memoryview(buffer))
    buffer[position] ^= 1 << bit
    with pytest.raises(DigestError, match=f"bucket {position // 256} "):
        verify(manifest, memoryview(buffer))


def test_missing_bytes_and_foreign_layouts_are_found() -> None:
    manifest, buffer = version()
    with pytest.raises(DigestError, match="bytes arrived"):
        verify(manifest, memoryview(buffer)[:-1])
    renamed = manifest.model_copy(
        update={"weights": (manifest.weights[0].model_copy(update={"name": "c"}), manifest.weights[1])}
    )
    with pytest.raises(DigestError, match="the version has digest"):
        verify(renamed, memoryview(buffer))
