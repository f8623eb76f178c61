"""Frames in, frames out, and nothing malformed gets through."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.protocols import wire
from penstock.protocols.experience import ExperienceError, Group, GroupSummary
from penstock.protocols.messages import Finished, Take, from_envelope, to_envelope
from penstock.protocols.packed_groups import pack_group, unpack_group
from penstock.protocols.routing import no_routing, unknown
from tests.conftest import make_group, with_candidates

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text()
arrays = hnp.arrays(
    st.sampled_from(["uint8", "int32", "int64", "float32", "float64"]), hnp.array_shapes(max_dims=3, max_side=5)
)
bodies = st.dictionaries(
    st.text(), st.recursive(scalars | arrays, lambda inner: st.lists(inner, max_size=4)), max_size=5
)

SUMMARY = GroupSummary(trajectories=1, tokens=4, sampled=2, oldest=0, newest=0)


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return a == b


@given(bodies, st.integers(0, 2**62), st.integers(0, 2**62))
def test_what_is_encoded_is_decoded(body: dict, message_id: int, reply_to: int) -> None:
    envelope = wire.Envelope("Anything", message_id, reply_to, body)
    decoded = wire.decode(wire.encode(envelope))
    assert (decoded.type, decoded.id, decoded.reply_to) == ("Anything", message_id, reply_to)
    assert decoded.body.keys() == body.keys() and all(same(body[key], decoded.body[key]) for key in body)


def test_small_arrays_are_inline_and_large_ones_are_frames_without_a_copy() -> None:
    small, large = np.zeros(10, np.float32), np.arange(wire.INLINE_BYTES, dtype=np.uint8)
    frames = wire.encode(wire.Envelope("X", 0, 0, {"small": small, "large": large}))
    assert len(frames) == 2
    decoded = wire.decode(frames).body["large"]
    assert np.shares_memory(decoded, large)
    assert not wire.decode([bytes(f) for f in frames]).body["large"].flags.writeable


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode([noise])


def test_shapes_that_lie_are_refused_before_anything_is_allocated() -> None:
    lying = msgpack.ExtType(1, msgpack.packb(["float32", [1 << 40], b"\0" * 8]))
    header = msgpack.packb([wire.PROTOCOL, "X", 0, 0, {"array": lying}])
    with pytest.raises(wire.WireError, match="8 arrived"):
        wire.decode([header])


@pytest.mark.parametrize("dtype", ["object", "O", "U10", "complex64", 7])
def test_unknown_dtypes_are_refused(dtype: object) -> None:
    array = msgpack.ExtType(1, msgpack.packb([dtype, [1], b"\0" * 8]))
    with pytest.raises(wire.WireError, match="dtype"):
        wire.decode([msgpack.packb([wire.PROTOCOL, "X", 0, 0, {"a": array}])])


def test_another_protocol_is_named() -> None:
    with pytest.raises(wire.WireError, match="speaks protocol 99"):
        wire.decode([msgpack.packb([99, "X", 0, 0, {}])])


def test_objects_cannot_be_sent() -> None:
    with pytest.raises(wire.WireError, match="cannot cross"):
        wire.pack({"object": object()})


def test_unknown_messages_and_fields_are_refused() -> None:
    with pytest.raises(wire.WireError, match="unknown message type 'Nonsense'"):
        from_envelope(wire.Envelope("Nonsense", 0, 0, {}))
    with pytest.raises(wire.WireError, match="Take: extra"):
        from_envelope(wire.Envelope("Take", 0, 0, {"step": 1, "extra": 2}))
    wrong = to_envelope(
        Finished(purpose="train", number=1, attempt=1, summary=SUMMARY, experience=np.zeros(3, np.uint8))
    )
    wrong.body["experience"] = np.zeros(3, np.float32)
    with pytest.raises(wire.WireError, match="expected uint8"):
        from_envelope(wrong)
    assert from_envelope(to_envelope(Take(step=3))) == Take(step=3)


@given(st.integers(0, 2**31), st.integers(1, 6), st.booleans())
def test_groups_survive_packing(seed: int, n: int, candidates: bool) -> None:
    random = np.random.default_rng(seed)
    group = make_group(random, 5, n, versions=(1, 2))
    if candidates:
        group = Group(5, group.prompt, [with_candidates(random, t) for t in group.trajectories])
    again = unpack_group(pack_group(group))
    assert again.number == 5 and again.prompt == group.prompt and again.sampled == group.sampled
    for a, b in zip(group.trajectories, again.trajectories, strict=True):
        assert a.text == b.text and a.finish == b.finish
        for name in ("tokens", "loss_mask", "logprobs", "versions", "candidate_counts", "candidate_ids"):
            assert np.array_equal(getattr(a, name), getattr(b, name))


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("versions", np.zeros(3, np.int32), "one value for each"),
        ("lengths", np.array([0], np.int32), "at least one"),
        ("text", ["a", "b"], "do not agree"),
        ("prompt", {"index": "x"}, "prompt"),
        ("logprobs", None, "one value for each"),
    ],
)
def test_groups_that_break_their_rules_are_refused(field: str, value: object, match: str) -> None:
    fields = wire.unpack(pack_group(make_group(np.random.default_rng(0), 1, 1)))
    fields[field] = value
    with pytest.raises(ExperienceError, match=match):
        unpack_group(wire.pack(fields))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda counts, ids: (counts[:-1], ids), "one for each token"),
        (lambda counts, ids: (np.r_[1, counts[1:]], ids), "0 where nothing was sampled"),
        (lambda counts, ids: (counts, ids[:-1]), "as many as"),
        (lambda counts, ids: (counts, np.full_like(ids, 77)), "among those it was chosen from"),
        (lambda counts, ids: (counts, ids.astype(np.int64)), "int32"),
    ],
)
def test_candidates_that_break_their_rules_are_refused(change: Any, match: str) -> None:
    random = np.random.default_rng(3)
    group = make_group(random, 1, 1)
    fields = wire.unpack(pack_group(Group(1, group.prompt, [with_candidates(random, t) for t in group.trajectories])))
    assert fields["candidate_ids"].size > 1
    counts, ids = change(fields["candidate_counts"], fields["candidate_ids"])
    fields["candidate_counts"], fields["candidate_ids"] = counts.astype(np.int32), ids
    with pytest.raises(ExperienceError, match=match):
        unpack_group(wire.pack(fields))


def test_a_group_says_where_the_tokens_of_some_of_its_trajectories_went() -> None:
    random = np.random.default_rng(3)
    group = make_group(random, 1, 3)
    sizes = [len(t.tokens) for t in group.trajectories]
    routes = [
        random.integers(0, 7, (sizes[0], 2, 3)).astype(np.uint8),
        no_routing(),
        np.full((sizes[2], 2, 3), 5, np.uint8),
    ]
    told = [replace(t, routing=routing) for t, routing in zip(group.trajectories, routes, strict=True)]
    again = unpack_group(pack_group(Group(1, group.prompt, told))).trajectories
    assert np.array_equal(again[0].routing, routes[0]) and np.array_equal(again[2].routing, routes[2])
    assert (again[1].routing == unknown(np.dtype(np.uint8))).all() and again[1].routing.shape == (sizes[1], 2, 3)
    for bad in (routes[0][:-1], routes[0][:, :, 0], routes[0].astype(np.int32), -routes[0].astype(np.int16) - 1):
        with pytest.raises(ExperienceError, match="routing: "):
            replace(told[0], routing=bad)


def test_a_token_without_a_version_is_refused() -> None:
    fields = wire.unpack(pack_group(make_group(np.random.default_rng(0), 1, 1)))
    fields["versions"] = np.full_like(fields["versions"], -1)
    with pytest.raises(ExperienceError, match="has a version exactly where"):
        unpack_group(wire.pack(fields))


def test_a_value_that_no_message_could_carry_is_refused_before_it_is_sent() -> None:
    wire.check({"pictures": [bytes(1 << 20)]})
    with pytest.raises(wire.WireError, match="bytes are more than a message takes of one value"):
        wire.check({"pictures": [bytes(20 << 20), bytes(20 << 20)]})
