"""Which turn a request goes on from, and which ones end a branch: as by looking at all of a session, at the cost of
looking at one conversation."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from penstock.services.gateway.conversation import NOTHING, Telling
from penstock.services.gateway.session import Session, Turn
from penstock.services.turns.answers import Answer


class Message(dict[str, Any]):
    """Counts how often one is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Message.compared += 1
        return super().__eq__(other)


def grown(session: Session, parent: Turn | None, rng: random.Random, letters: str) -> Turn:
    """A turn that goes on from ``parent`` in chat, or beside it in text."""
    asked, said = rng.choice(letters), rng.choice(letters)
    given, told = (np.array([ord(each)], np.int32) for each in (asked, said))
    turn = Turn(
        len(session.turns), parent.number if parent else None, given,
        Answer(told, np.zeros(1, np.float32), np.zeros(1, np.int32)),
        [*(parent.said if parent else ()), Message(text=asked), Message(content=said)],
        prompt_tokens=(parent.size if parent else 0) + 1, wanted=rng.random() < 0.7,
    )  # fmt: skip
    session.turns[turn.number] = turn
    return turn


def longest(session: Session, fits: list[Turn]) -> Turn | None:
    """By looking at all: of two that are as long, the one that its agent has had, then the first."""
    return max(fits, key=lambda turn: (len(turn.said), turn.wanted, -turn.number), default=None)


@pytest.mark.parametrize("seed", range(20))
def test_a_request_goes_on_from_the_longest_conversation_that_it_begins_with(seed: int) -> None:
    rng, session = random.Random(seed), Session(0)
    for _ in range(40):
        grown(session, rng.choice([None, *session.turns.values()]), rng, "ab")
    turns = list(session.turns.values())
    for turn in turns:
        wrong = rng.random() < 0.3
        said = [*turn.said[: -1 if wrong else None], Message(text="c")]
        asked = session.tokens(turn)[: -1 if wrong else None]
        tokens, text = np.append(asked, 99).astype(np.int32), "".join(map(chr, asked)) + "c"
        found = longest(session, [each for each in turns if each.said == said[: len(each.said)]])
        assert session.parent_of(said, NOTHING) is found and session.parent_by_text(text) is found
        assert session.parent_of(said, Telling(tools="tools")) is None
        by_tokens, added = session.parent_by_tokens(tokens)
        assert by_tokens is found and added.tolist() == tokens[found.size if found else 0 :].tolist()
    parents = {each.number for turn in turns if turn.wanted for each in session.path(turn)[:-1]}
    assert session._leaves() == [turn for turn in turns if turn.wanted and turn.number not in parents]


@pytest.mark.parametrize("branches", [1, 50])
def test_a_long_session_is_not_compared_turn_by_turn(branches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, session, length = random.Random(0), Session(0), 400
    last: Turn | None = None
    for _ in range(length):
        last = grown(session, last, rng, "ab")
    assert last is not None
    for _ in range(branches):
        grown(session, last, rng, "cd").wanted = True
    Message.compared, made = 0, list[Turn | None]()
    own = session.tokens
    monkeypatch.setattr(session, "tokens", lambda turn: (made.append(turn), own(turn))[1])
    said = [Message(each) for each in [*last.said, Message(text="e"), Message(content="e"), Message(text="e")]]
    assert session.parent_of(said, NOTHING) is last and Message.compared < 4 * (2 * length + branches)
    tokens = np.append(own(last), [101, 101, 101]).astype(np.int32)
    assert session.parent_by_tokens(tokens)[0] is last and len(made) == 1
    assert len(session._leaves()) == branches


def test_the_branch_that_was_asked_for_last_is_the_last_in_whatever_order_answers_arrived() -> None:
    rng, prompt = random.Random(0), np.array([9], np.int32)
    for order in ((0, 1), (1, 0)):  # the second, as another gateway's that takes the session over may have it
        session = Session(0)
        grown(session, None, rng, "a")
        grown(session, None, rng, "b")
        for turn in session.turns.values():
            turn.wanted = True
        session.turns = {number: session.turns[number] for number in order}
        made = session.trajectories(lambda ids: "", prompt, False)
        last = session.turns[1]
        assert made[-1].tokens.tolist() == [*last.given.tolist(), *last.answer.tokens.tolist()]
