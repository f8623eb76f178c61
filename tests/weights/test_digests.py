"""One digest, wherever the bytes are: the processor's GMAC, put together from parts, and by matrices as on a GPU."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocols import digests
from penstock.protocols.digests import Gmac
from penstock.services.weights import gpu_digest
from penstock.services.weights.gpu_digest import GpuGmac

GMAC = Gmac(bytes(range(16)))
ON_GPU = GpuGmac(GMAC, torch.device("cpu"))
"""Its arithmetic; the CPU stands in for the device."""


def test_it_is_the_gmac_of_the_standard() -> None:
    data = os.urandom(1000)
    assert GMAC.bucket(data) == AESGCM(GMAC.key).encrypt(digests._NONCE, b"", data).hex()
    # SP 800-38D's test case 1 of the GCM specification: H of the zero key.
    assert Gmac(bytes(16)).h == 0x66E94BD4EF8A2C3B884CFA59CA342B2E
    assert digests.multiply(0x0388DACE60B6A392F328C2B971B2FE78, Gmac(bytes(16)).h) == 0x5E2EC746917062882C85B0685353DEB7


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=9000), cuts=st.lists(st.integers(0, 9000), max_size=4))
def test_parts_and_matrices_give_the_same_number(data: bytes, cuts: list[int]) -> None:
    wanted = GMAC.bucket(data)
    assert ON_GPU.bucket(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)) == wanted
    hasher = GMAC.hasher()
    places = sorted({0, *(min(cut, len(data)) for cut in cuts), len(data)})
    for start, end in itertools.pairwise(places):
        hasher.update(data[start:end])
    assert hasher.hexdigest() == wanted
    # Parts that begin and end anywhere: each is padded with zeros to whole blocks of the bucket.
    parts, blocks = [], -(-len(data) // 16)
    for start, end in itertools.pairwise(places):
        first, last = start // 16, -(-end // 16)
        mine = bytes(start - 16 * first) + data[start:end] + bytes(16 * last - end)
        parts.append(GMAC.part(mine, blocks - last))
        on_gpu = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        assert ON_GPU.part(on_gpu, blocks - last) == parts[-1]
    assert GMAC.put_together(parts, len(data)) == wanted


def test_a_bucket_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_digest, "CHUNK_BYTES", 4096)
    data = torch.randint(0, 256, (1_000_003,), dtype=torch.uint8)
    assert ON_GPU.bucket(data) == GMAC.bucket(data.numpy())


@settings(max_examples=50, deadline=None)
@given(data=st.binary(min_size=1, max_size=500), place=st.integers(0, 499), change=st.integers(1, 255))
def test_nothing_changes_unnoticed_and_every_key_has_digests_of_its_own(data: bytes, place: int, change: int) -> None:
    other = bytearray(data)
    other[place % len(data)] ^= change
    assert GMAC.bucket(data) != GMAC.bucket(bytes(other))
    assert GMAC.bucket(data) != GMAC.bucket(data + b"\0"), "the length counts"
    assert GMAC.bucket(data) != Gmac.of_run("another").bucket(data)


def test_a_run_has_its_own_key_for_its_life() -> None:
    assert Gmac.of_run("a").key == Gmac.of_run("a").key != Gmac.of_run("b").key
    assert GMAC.whole("l", ["a", "b"]) != Gmac.of_run("a").whole("l", ["a", "b"])
