"""Texts that end an answer are found at the same token as by reading all of it, and the cost of a token does not grow
with the answer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock.protocols.experience import Sampling
from penstock.services.rollout.engines.base import Request
from penstock.services.rollout.engines.torch.stops import Stops

STOPS = ("ab", "你好", "\n\nObservation:", " é")
SPECIAL = "<|end|>"


def bytewise() -> Tokenizer:
    """As GPT-2's and its heirs': tokens are pieces of bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [first + second for first in "abnO:" for second in "abserv"]
    made = Tokenizer(models.BPE({token: id for id, token in enumerate([*letters, *pairs])}, []))
    made.decoder = decoders.ByteLevel()
    return made


def with_bytes_to_fall_back_on() -> Tokenizer:
    """As Llama's first one: bytes stand for what has no token, and a space at the beginning is left out."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "ab", "Observation:", "\n", "▁é"]
    made = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


@pytest.fixture(params=[bytewise, with_bytes_to_fall_back_on])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    made: Tokenizer = request.param()
    made.add_special_tokens([SPECIAL])
    return made


def decoder(tokenizer: Tokenizer) -> Callable[[list[int]], str]:
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def likely(tokenizer: Tokenizer) -> list[int]:
    """Tokens of the stops and of their parts; broken characters; one that shows nothing, and one that there is not."""
    words = ["a", "b", "ab", "▁a", "▁", "Ġ", "\n", "Ċ", "▁é", "Observation:", SPECIAL]
    found = [tokenizer.token_to_id(word) for word in words]
    for byte in "你好é".encode():
        found += [tokenizer.token_to_id(f"<0x{byte:02X}>"), tokenizer.token_to_id(letter(byte))]
    return [id for id in found if id is not None] + [tokenizer.get_vocab_size() + 5]


def letter(byte: int) -> str:
    """What stands for a byte in `bytewise`."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [each for each in range(256) if each not in printed]
    return chr(byte) if byte in printed else chr(256 + others.index(byte))


def test_a_stop_is_found_where_the_whole_text_first_has_it(tokenizer: Tokenizer) -> None:
    decode, random, ended = decoder(tokenizer), np.random.default_rng(0), 0
    stops, some = Stops(decode), likely(tokenizer)
    stops.add(Request(1, 0, np.ones(1, np.int32), Sampling(stop=STOPS)))
    chinese = [tokenizer.token_to_id(name) for byte in "你好".encode() for name in (f"<0x{byte:02X}>", letter(byte))]
    word = [id for id in chinese if id is not None]
    for _ in range(400):
        answer = random.choice(some, 40).astype(np.int32)
        if random.random() < 0.5:
            answer[20 : 20 + len(word)] = word
        for size in range(1, len(answer) + 1):
            whole = decode(answer[:size].tolist())
            expected = any(stop in whole for stop in STOPS)
            assert stops.reached(1, answer[:size]) == expected, (answer[:size].tolist(), whole)
            if expected:
                ended += 1
                break
    assert ended > 200


def test_a_token_costs_the_same_however_long_the_answer_is(tokenizer: Tokenizer) -> None:
    decode, read = decoder(tokenizer), [0]

    def counted(ids: list[int]) -> str:
        read[0] += len(ids)
        return decode(ids)

    stops = Stops(counted)
    stops.add(Request(1, 0, np.ones(1, np.int32), Sampling(stop=STOPS)))
    answer = np.full(3000, tokenizer.token_to_id("b"), np.int32)
    answer[::3] = tokenizer.token_to_id(SPECIAL)
    costs = []
    for size in (100, 3000):
        stops.reached(1, answer[:size])
        read[0] = 0
        assert not stops.reached(1, answer[:size])
        costs.append(read[0])
    assert costs[0] == costs[1] < 30


def test_requests_are_forgotten() -> None:
    stops = Stops(lambda ids: "ab")
    for number in range(3):
        stops.add(
            Request(number, 0, np.ones(1, np.int32), Sampling(stop=("ab",) if number else ()), stop_ids=frozenset())
        )
    assert len(stops) == 2 and stops.reached(1, np.array([7])) and not stops.reached(0, np.array([7]))
    stops.drop(1)
    stops.keep({0, 1})
    assert not stops
