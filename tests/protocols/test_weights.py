"""A version is its bytes: any difference is found, and named."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.protocols.digests import Gmac
from penstock.protocols.versions import DigestError, Digests, Layout, Share, digests_of, lay_out
from penstock.protocols.weight_channel import BucketError, VersionAssembly

GMAC = Gmac.of_run("test")


def version(nbytes: int = 1024, bucket: int = 256) -> tuple[Layout, Digests, bytearray]:
    placed = lay_out(
        [("a", "float32", (nbytes // 8,), nbytes // 2), ("b", "float32", (nbytes // 8,), nbytes // 2)], bucket
    )
    buffer = bytearray(np.random.default_rng(0).bytes(placed.nbytes))
    return placed, digests_of(placed, memoryview(buffer), GMAC), buffer


def receive(placed: Layout, buffer: bytearray) -> VersionAssembly:
    intake = VersionAssembly(1, 7, placed, GMAC)
    for index, (start, end) in enumerate(placed.spans):
        intake.bucket(1, 7, index, memoryview(buffer)[start:end])
    return intake


@given(st.integers(0, 1023), st.integers(0, 7))
def test_one_flipped_bit_is_found_its_bucket_named_and_asked_for_again(position: int, bit: int) -> None:
    placed, digests, buffer = version()
    buffer[position] ^= 1 << bit
    intake = receive(placed, buffer)
    wrong = intake.commit(1, 7, digests)
    assert list(wrong) == intake.missing == [position // 256] and "the manifest declares" in wrong[position // 256]
    assert intake.whole() is None
    start, end = placed.spans[position // 256]
    with pytest.raises(BucketError, match=f"bucket {position // 256} is refused: its digest"):
        intake.bucket(1, 7, position // 256, memoryview(buffer)[start:end])
    buffer[position] ^= 1 << bit
    intake.bucket(1, 7, position // 256, memoryview(buffer)[start:end])
    assert intake.whole() == digests.whole


def test_missing_repeated_and_foreign_buckets_are_refused_by_name() -> None:
    placed, digests, buffer = version()
    intake = VersionAssembly(2, 7, placed, GMAC)
    first = memoryview(buffer)[:256]
    intake.bucket(2, 7, 0, first)
    with pytest.raises(BucketError, match="bucket 0 is refused: it is here already"):
        intake.bucket(2, 7, 0, first)
    with pytest.raises(BucketError, match="bucket 1 of epoch 1, version 7 is refused"):
        intake.bucket(1, 7, 1, first)
    with pytest.raises(BucketError, match="bucket 9 is refused: there are 4"):
        intake.bucket(2, 7, 9, first)
    with pytest.raises(BucketError, match="200 bytes arrived, it has 256"):
        intake.bucket(2, 7, 1, first[:200])
    assert intake.commit(2, 7, digests) == {} and intake.missing == [1, 2, 3] and intake.whole() is None


@given(st.integers(2, 6), st.integers(0, 1023), st.integers(0, 7))
def test_workers_that_share_a_version_prove_all_of_it_and_one_of_them_finds_what_is_wrong(
    count: int, position: int, bit: int
) -> None:
    placed, digests, buffer = version()
    buffer[position] ^= 1 << bit
    shares = [Share(place=place, count=count, buffers=("a", "b"), into=0) for place in range(count)]
    intakes = [VersionAssembly(1, 7, placed, GMAC, share=share) for share in shares]
    for intake in intakes:
        for index in intake.wanted:
            start, end = placed.spans[index]
            intake.bucket(1, 7, index, memoryview(buffer)[start:end])
    assert sorted(index for intake in intakes for index in intake.wanted) == list(range(len(placed.spans)))
    wrong = [list(intake.commit(1, 7, digests)) for intake in intakes]
    assert [index for found in wrong for index in found] == [position // 256]
    assert [intake.whole() for intake in intakes] == [None if found else digests.whole for found in wrong]
    others = next(intake for intake in intakes if position // 256 not in intake.wanted)
    start, end = placed.spans[position // 256]
    with pytest.raises(BucketError, match=f"bucket {position // 256} is refused: it is another worker's"):
        others.bucket(1, 7, position // 256, memoryview(buffer)[start:end])


def test_a_manifest_that_contradicts_itself_or_the_proposal_is_refused() -> None:
    placed, digests, buffer = version()
    intake = receive(placed, buffer)
    with pytest.raises(DigestError, match="the version has digest"):
        intake.commit(1, 7, digests.model_copy(update={"whole": "0" * 32}))
    with pytest.raises(DigestError, match="3 bucket digests for 4 buckets"):
        intake.commit(1, 7, digests.model_copy(update={"buckets": digests.buckets[:3]}))
    with pytest.raises(DigestError, match="is not for 1, 7"):
        intake.commit(1, 8, digests)
    renamed = placed.weights[0].model_copy(update={"name": "c"}), placed.weights[1]
    other = receive(Layout(weights=renamed, nbytes=placed.nbytes, bucket_bytes=placed.bucket_bytes), buffer)
    with pytest.raises(DigestError, match="the version has digest"):
        other.commit(1, 7, digests)


def test_a_layout_that_leaves_its_buffer_is_refused() -> None:
    placed, _, _ = version()
    data = placed.model_dump()
    data["weights"][1]["offset"] = 2048
    with pytest.raises(ValidationError, match="b lies outside the buffer"):
        Layout.model_validate(data)
