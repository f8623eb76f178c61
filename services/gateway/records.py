"""What the broker keeps of a session for a gateway that takes it over, and how that becomes a session again.

session.PLACE           {life, spared, opened, owner, beats}, and once it has ended {reward, failure, metrics, unheard,
                        turn_rewards, truncated, branches}
picture.DIGEST          a file that some of the group's sessions show
note.PLACE.TURN         {asked, life, parent, given, added, told, template, stop, calls}: what was asked, as far as
                        its parent has not
answer.PLACE.TURN       what the policy said to it
reward.PLACE.TURN       {reward}: what its agent has said that it was worth, until the session has ended
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from penstock.protocols import wire
from penstock.protocols.experience import as_bytes
from penstock.protocols.mailbox import DeadlineError, RefusedError
from penstock.protocols.messages import Lease, Message, Note, TurnKey
from penstock.protocols.messages.agents import SESSION, session_name
from penstock.services.gateway.conversation import Telling
from penstock.services.gateway.errors import AgentError, refused
from penstock.services.gateway.pictures import digests
from penstock.services.gateway.replies import Replies
from penstock.services.gateway.session import Session, Turn, canonical, is_chat
from penstock.services.gateway.work import Key, Work
from penstock.services.turns.answers import unpack_answer

NOTE_S = 60.0
PICTURE = "picture"
NOBODY = -1
"""In the place of a parent's number: the turn begins a conversation."""


class Records:
    """Has the broker keep what is said of sessions. ``ask`` says something to it, with a deadline in seconds; ``lost``
    is told of a group that is another gateway's by now."""

    def __init__(self, ask: Callable[[Message, float], Future[Message]], lost: Callable[[Key], None]) -> None:
        self._ask, self._lost = ask, lost

    async def keep(self, work: Work, session: Session, what: dict[str, Any]) -> None:
        """Of the session. Raises `AgentError`."""
        whole = {"life": session.life, "spared": session.spared} | what
        await self._keep(work, f"{SESSION}.{session.place}", whole)

    async def keep_reward(self, work: Work, session: Session, turn: int, reward: float) -> None:
        """Of a turn. Raises `AgentError`."""
        purpose, number = work.key
        key = TurnKey(purpose=purpose, number=number, place=session.place, turn=turn)
        await self._keep(work, key.reward_record, {"reward": reward})

    async def keep_pictures(self, work: Work, files: Mapping[str, bytes]) -> None:
        """Each once for all sessions of the group, by its digest. Raises `AgentError`."""
        async with work.keeping:
            new = {name: picture for name, picture in files.items() if name not in work.files}
            await asyncio.gather(*(self._say(work, f"{PICTURE}.{name}", picture) for name, picture in new.items()))
            work.files |= new

    async def _keep(self, work: Work, name: str, what: dict[str, Any]) -> None:
        await self._say(work, name, wire.pack(what))

    async def _say(self, work: Work, name: str, data: bytes) -> None:
        purpose, number = work.key
        note = Note(purpose=purpose, number=number, name=name, data=as_bytes(data))
        try:
            await asyncio.wrap_future(self._ask(note, NOTE_S))
        except DeadlineError:
            raise AgentError(503, "broker_away", "the broker does not answer; ask again", 5.0) from None
        except RefusedError as error:
            raise self.refused(work.key, error) from error

    def refused(self, key: Key, error: RefusedError) -> AgentError:
        """What an agent is told where the broker has refused what was said of its group."""
        if error.code == "not_held":
            self._lost(key)
        return refused(error)


def session_id(lease: Lease, session: Session) -> str:
    """What agents call it."""
    return session_name(lease.purpose, lease.number, session.place, session.life)


def at_the_end(session: Session, owner: str) -> dict[str, Any]:
    """What is kept of one that has ended, beside how good it was."""
    heard = {turn.number for turn in session.turns.values() if turn.wanted}
    unheard = sorted({*range(session.next_turn)} - heard)  # those among it that a rollout is still at
    rewards = {str(turn.number): turn.reward for turn in session.turns.values() if turn.reward is not None}
    return {"opened": True, "owner": owner, "ended": True, "unheard": unheard, "turn_rewards": rewards}


def restore(work: Work, replies: Replies) -> None:
    """Takes up what a gateway before this one had kept."""
    lease, by_place = work.lease, {session.place: session for session in work.sessions}
    named = ((name.partition("."), data) for name, data in lease.records.items())
    work.files |= {digest: data.tobytes() for (kind, _, digest), data in named if kind == PICTURE}
    ended: list[tuple[Session, dict[str, Any]]] = []
    for session in work.sessions:
        kept = lease.records.get(f"{SESSION}.{session.place}")
        if kept is None:
            continue
        state = wire.unpack(kept.tobytes())
        session.life, session.opened = state["life"], state["opened"]
        session.beats, session.owner = state.get("beats", False), state.get("owner", "")
        session.spared = state.get("spared", 0)  # of older code
        session.instructions = None
        session.unheard = set(state.get("unheard", ()))
        if state.get("ended"):
            ended.append((session, state))
    found = (TurnKey.of_note(lease.purpose, lease.number, name) for name in lease.records)
    for key in sorted(filter(None, found), key=lambda key: key.turn):
        _restore_turn(work, by_place[key.place], key, replies)
    for session, state in ended:
        session.end(state)


def _restore_turn(work: Work, session: Session, key: TurnKey, replies: Replies) -> None:
    lease = work.lease
    note, number = wire.unpack(lease.records[key.note_record].tobytes()), key.turn
    session.next_turn = max(session.next_turn, number + 1)
    if note["life"] != session.life:
        return
    answer = unpack_answer(lease.records[key.answer_record].tobytes())
    stop = note.get("stop", ())  # notes of older code say nothing of stops, nor of calls, nor of templates
    telling = Telling(note["told"], note.get("template", ""))
    tools = telling.tools if note.get("calls", True) else ""
    parent = None if note["parent"] == NOBODY else session.turns[note["parent"]]
    if "said" in note:  # notes of older code have all of the conversation
        said = json.loads(note["said"])
    else:
        said = [*(parent.said if parent else ()), *json.loads(note["added"])]
    about = answer, tools, stop, note["given"], is_chat(said)
    message, stopped_by = replies.message(lease, session.place, number, *about)
    turn = Turn(number, parent.number if parent else None, note["given"], answer, [*said, canonical(message)], telling)
    turn.message, turn.stopped_by = message, stopped_by
    turn.asked, turn.prompt_tokens = note["asked"], (parent.size if parent else 0) + len(turn.given)
    turn.wanted = number not in session.unheard
    shown = list(digests(said[len(parent.said) if parent else 0 :]))
    turn.pictures = tuple(work.files[name] for name in shown)
    session.files |= {name: work.files[name] for name in shown}
    if (kept := lease.records.get(key.reward_record)) is not None:
        turn.reward = wire.unpack(kept.tobytes())["reward"]
    session.turns[number] = turn
