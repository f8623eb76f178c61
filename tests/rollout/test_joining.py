"""What several turns say of where tokens went, joined."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from penstock.protocols import wire
from penstock.protocols.experience import ExperienceError, Prompt, Sampling
from penstock.protocols.messages import Lease
from penstock.protocols.routing import no_routing, unknown
from penstock.services.rollout.engines.base import Completion
from penstock.services.turns.answers import pack_answer, unpack_answer
from penstock.services.turns.joining import Again, join, routed_before
from penstock.services.turns.streams import stream_of, turn_stream

OPEN = unknown(np.dtype(np.uint8))


def said(tokens: Sequence[int], experts: Sequence[int]) -> Completion:
    """``experts``: of these tokens, and of some before them."""
    size = len(tokens)
    routing = np.array(experts, np.uint8)[:, None, None].repeat(2, 2)
    return Completion(
        1, 0, np.array(tokens, np.int32), -np.ones(size, np.float32), np.zeros(size, np.int32), "stop", routing=routing
    )


def given(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_the_first_that_says_it_counts_and_the_last_token_is_not_known() -> None:
    first, second = said([7, 8], [1, 2, 3, OPEN]), said([9], [5, 6, 6, 4, 6, OPEN])
    whole = join([given(5, 6), first, given(4), second], "", "stop")
    assert whole.routing[:, 0].tolist() == [[n, n] for n in (1, 2, 3, 4, 6, OPEN)]
    partly = join([given(5, 6), first, given(4), said([9], [4, 6, OPEN])], "", "stop")
    np.testing.assert_array_equal(partly.routing, whole.routing)


def test_a_turn_that_is_trained_elsewhere_still_says_where_its_tokens_went() -> None:
    first = said([7, 8], [1, 2, 3, OPEN])
    branch = join([given(5, 6), Again(first), given(3), said([2], [4, 6, OPEN])], "", "stop")
    assert branch.loss_mask.tolist() == [0, 0, 0, 0, 0, 1]
    assert branch.routing[:, 0, 0].tolist() == [1, 2, 3, 4, 6, OPEN]


def test_where_nothing_was_recorded_there_is_none() -> None:
    mute = Completion(1, 0, given(7), -np.ones(1, np.float32), np.zeros(1, np.int32), "stop")
    assert join([given(5), mute], "", "stop").routing.shape == no_routing().shape
    mixed = join([given(5), mute, given(6), said([8], [4, 5, 6, OPEN])], "", "stop")
    assert mixed.routing[:, 0, 0].tolist() == [4, 5, 6, OPEN]


def test_turns_of_different_models_are_no_trajectory() -> None:
    first = said([7, 8], [1, 2, 3, OPEN])
    wide = replace(first, routing=np.zeros((4, 2, 1), np.uint8))
    other = replace(first, routing=first.routing.astype(np.int16))
    long = replace(first, routing=np.zeros((99, 2, 2), np.uint8))
    for second in (wide, other, long):
        with pytest.raises(ExperienceError, match="recorded by another model"):
            join([given(5, 6), first, given(4), second], "", "stop")


def test_how_many_tokens_earlier_turns_have_said_it_of() -> None:
    assert routed_before(7, 7) == 0 and routed_before(12, 3) == 8


def test_an_answer_carries_it() -> None:
    answer = said([7, 8], [1, 2, OPEN])
    again = unpack_answer(pack_answer(answer, "stop", 0.5))
    np.testing.assert_array_equal(again.routing, answer.routing)
    fields = wire.unpack(pack_answer(answer, "stop", 0.5)) | {"routing": np.zeros((2, 2), np.uint8)}
    with pytest.raises(wire.WireError, match="routing"):
        unpack_answer(wire.pack(fields))


def test_turns_and_single_answers_never_draw_alike() -> None:
    sampling = Sampling(n=2, max_new_tokens=1)
    found = list[int]()
    for purpose, number in itertools.product(("train", "eval"), range(3)):
        prompt = Prompt(index=number, text="a")
        lease = Lease(purpose=purpose, number=number, attempt=1, seed=5, prompt=prompt, sampling=sampling)
        places = itertools.product(range(3), range(3))
        found += [stream_of(lease), *(turn_stream(lease, place, turn) for place, turn in places)]
    assert len(set(found)) == len(found) and all(-(2**63) <= stream < 2**63 for stream in found)
