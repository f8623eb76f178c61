"""What the broker keeps of a session for a gateway that takes it over, and how that becomes a session again.

session.PLACE           {life, spared, opened, owner, beats}, and once it has ended {reward, failure, metrics, unheard}
note.PLACE.TURN         {asked, life, parent, given, added, told, stop}: what was asked, as far as its parent has not
answer.PLACE.TURN       what the policy said to it
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock.protocols import wire
from penstock.protocols.messages import Lease, TurnKey
from penstock.services.gateway.replies import Replies
from penstock.services.gateway.session import Session, Turn, canonical
from penstock.services.turns.answers import unpack_answer

NOBODY = -1
"""In the place of a parent's number: the turn begins a conversation."""


def session_id(lease: Lease, session: Session) -> str:
    """What agents call it. Another life has another name."""
    return f"{lease.purpose}-{lease.number}-{session.place}-{session.life}"


def ended(session: Session, owner: str) -> dict[str, Any]:
    """What is kept of one that has ended, beside how good it was."""
    heard = {turn.number for turn in session.turns.values() if turn.wanted}
    unheard = sorted({*range(session.next_turn)} - heard)  # those among it that a rollout is still at
    return {"opened": True, "owner": owner, "ended": True, "unheard": unheard}


def restore(lease: Lease, sessions: Sequence[Session], replies: Replies) -> None:
    """Takes up what a gateway before this one had kept."""
    by_place = {session.place: session for session in sessions}
    for session in sessions:
        kept = lease.records.get(f"session.{session.place}")
        if kept is None:
            continue
        state = wire.unpack(kept.tobytes())
        session.life, session.opened, session.ended = state["life"], state["opened"], state.get("ended", False)
        session.beats, session.owner = state.get("beats", False), state.get("owner", "")
        session.spared = state.get("spared", 0)  # of older code
        session.reward, session.failure = state.get("reward", 0.0), state.get("failure", "")
        session.metrics = state.get("metrics", {})
        session.unheard = set(state.get("unheard", ()))
    found = (TurnKey.of_note(lease.purpose, lease.number, name) for name in lease.records)
    for key in sorted(filter(None, found), key=lambda key: key.turn):
        _restore_turn(lease, by_place[key.place], key, replies)


def _restore_turn(lease: Lease, session: Session, key: TurnKey, replies: Replies) -> None:
    note, number = wire.unpack(lease.records[key.note_record].tobytes()), key.turn
    session.next_turn = max(session.next_turn, number + 1)
    if note["life"] != session.life:
        return
    answer = unpack_answer(lease.records[key.answer_record].tobytes())
    told, stop = note["told"], note.get("stop", ())  # notes of older code say nothing of stops
    message, stopped_by = replies.message(lease, session.place, number, answer, told, stop)
    parent = None if note["parent"] == NOBODY else session.turns[note["parent"]]
    if "said" in note:  # notes of older code have all of the conversation
        said = json.loads(note["said"])
    else:
        said = [*(parent.said if parent else ()), *json.loads(note["added"])]
    turn = Turn(number, parent.number if parent else None, note["given"], answer, [*said, canonical(message)], told)
    turn.message, turn.stopped_by = message, stopped_by
    turn.asked, turn.prompt_tokens = note["asked"], (parent.size if parent else 0) + len(turn.given)
    turn.wanted = number not in session.unheard
    session.turns[number] = turn
