"""Has the policy answer: a conversation to tokens, to the broker, and the answer back as a turn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import structlog

from penstock.protocols import wire
from penstock.protocols.experience import as_bytes
from penstock.protocols.mailbox import DeadlineError
from penstock.protocols.messages import UNANSWERED, Message, TurnAnswer, TurnKey, TurnRequest
from penstock.services.gateway.config import GatewayConfig
from penstock.services.gateway.conversation import Conversation, Telling
from penstock.services.gateway.errors import AgentError, no_room
from penstock.services.gateway.pictures import check_shown, digests, named
from penstock.services.gateway.records import NOBODY, Records
from penstock.services.gateway.replies import Replies
from penstock.services.gateway.session import Said, Session, Turn, canonical, is_chat
from penstock.services.gateway.work import Held, Work
from penstock.services.turns.answers import Answer, unpack_answer
from penstock.services.turns.joining import routed_before
from penstock.services.turns.room import MOST_CHARACTERS, too_long
from penstock.services.turns.streams import turn_stream
from penstock.services.turns.tokenizer import TextError, Tokenizer

log = structlog.get_logger()

LOST_S = 5.0
"""Before a turn is asked for again whose rollouts have all gone."""


class Spliced(NamedTuple):
    """What a conversation adds to the one that it goes on from."""

    parent: Turn | None
    """The last turn of that; None: it begins one."""
    given: np.ndarray
    """int32: tokens."""
    added: Said
    """Messages."""
    pictures: tuple[bytes, ...] = ()
    """What ``given`` shows."""


class Policy:
    """``say`` says something to the broker, with a deadline in seconds; ``max_length``: tokens that a conversation may
    have, None where the engine alone knows."""

    def __init__(
        self,
        config: GatewayConfig,
        text: Tokenizer,
        replies: Replies,
        max_length: int | None,
        say: Callable[[Message, float], Future[Message]],
        records: Records,
    ) -> None:
        self._config, self._text, self._replies, self._records = config, text, replies, records
        self._max_length, self._say = max_length, say

    def spliced(self, session: Session, asked: Conversation, telling: Telling) -> tuple[Said, Spliced]:
        """A conversation as it is compared, and what it adds, and to what; ``telling``: its own. Raises
        `AgentError`."""
        whole, files = named(asked.messages)
        said = [canonical(message) for message in whole]
        parent = session.parent_of(said, telling)
        added = said[len(parent.said) if parent else 0 :]
        pictures = self._shown(session, parent, added, files)
        try:
            words = json.dumps([_words(each) for each in added], ensure_ascii=False)
            self._check_size(words, "" if parent else telling.tools + telling.template)
            text = self._told(asked)
            if parent is None:
                given = text.encode_chat(said, asked.tools, pictures)
            else:
                last = int(parent.answer.tokens[-1])
                given = text.observe(added, True, last, parent.said[-1], pictures, asked.tools)
            return said, self._checked(session, Spliced(parent, given, added, pictures))
        except AgentError:
            raise
        except Exception as error:  # a template may raise anything, and what is nested too deep is not written out
            raise AgentError(400, "invalid_messages", f"the messages cannot be told to the model: {error}") from error

    def _told(self, asked: Conversation) -> Tokenizer:
        """By which it is told. Raises `AgentError`."""
        try:
            return self._text.telling(asked.template)
        except TextError as error:
            raise AgentError(400, "invalid_messages", str(error)) from error

    def written_on(self, session: Session, text: str) -> Spliced:
        """As `spliced`, of an agent that goes on from its own text and from what was answered to it."""
        parent = session.parent_by_text(text)
        added = text[len(parent.text) if parent else 0 :]
        self._check_size(added)
        try:
            if parent is None:
                return Spliced(None, self._text.encode_text(text), [{"text": text}])
            new = added.removeprefix(parent.stopped_by)  # which was sampled, and is not told
            return Spliced(parent, self._text.observe(new, False, int(parent.answer.tokens[-1])), [{"text": added}])
        except Exception as error:
            raise AgentError(400, "invalid_messages", f"the text cannot be told to the model: {error}") from error

    def of_tokens(self, session: Session, tokens: np.ndarray) -> Spliced:
        """As `spliced`, of an agent that speaks in tokens."""
        parent, given = session.parent_by_tokens(tokens)
        return self._checked(session, Spliced(parent, given, [{"tokens": given.tolist()}]))

    def _shown(
        self, session: Session, parent: Turn | None, added: Said, files: Mapping[str, bytes]
    ) -> tuple[bytes, ...]:
        """The files of the pictures that are ``added``. Raises `AgentError`."""
        names = list(digests(added))
        if names and not self._config.pictures:
            raise AgentError(
                400, "unsupported", "this run's policy is asked in words alone: gateway.pictures is false in its config"
            )
        known = {**files, **session.files}
        pictures = tuple(known[name] for name in names)
        if pictures:
            new = [known[name] for name in set(names) - session.files.keys()]
            check_shown([*session.pictures(parent), *pictures], [*session.files.values(), *new], session.room)
        return pictures

    def _checked(self, session: Session, spliced: Spliced) -> Spliced:
        """Where pictures are shown no words have the tokens that stand for one. Raises `AgentError`."""
        before = session.path(spliced.parent)
        if not spliced.pictures and not any(each.pictures for each in before):
            return spliced
        bare = [each.given for each in before if not each.pictures] if spliced.pictures else [spliced.given]
        try:
            self._text.check_bare(bare)
        except TextError as error:
            raise AgentError(400, "invalid_messages", str(error)) from error
        try:  # a branch that another is trained on would take it for a part of a picture
            self._text.check_bare([each.answer.tokens for each in before])
        except TextError as error:
            said = "the policy has said what stands for a part of a picture; begin another conversation"
            raise AgentError(400, "cannot_answer", said) from error
        return spliced

    def _check_size(self, *added: str) -> None:
        """Raises `AgentError` where it cannot have room."""
        size = sum(map(len, added))
        if (reason := too_long(size, self._max_length)) and self._max_length is not None:
            raise no_room(-(-size // MOST_CHARACTERS), self._max_length, reason)

    async def ask(
        self,
        held: Held,
        asked: str,
        spliced: Spliced,
        telling: Telling,
        max_tokens: int | None,
        stop: Sequence[str],
        calls: bool = True,
    ) -> Turn:
        """The turn, once it is durable; without ``calls`` all of it is text. Raises `AgentError`, or `RefusedError`
        where the group is not ours any more."""
        work, session, (parent, given, added, pictures) = held.work, held.session, spliced
        if len(session.turns) + held.questions.pending > self._config.max_turns:
            raise AgentError(400, "too_many_turns", f"a session has at most gateway.max_turns={self._config.max_turns}")
        prompt = np.concatenate([session.tokens(parent), given]).astype(np.int32)
        sampling = self._sampling(work, session, len(prompt), max_tokens, stop)
        number, session.next_turn = session.next_turn, session.next_turn + 1
        files = dict(zip(digests(added), pictures, strict=True))
        if held.life == session.life:
            session.files |= files
        key = TurnKey(purpose=work.lease.purpose, number=work.lease.number, place=session.place, turn=number)
        note = {
            "asked": asked,
            "life": held.life,
            "parent": NOBODY if parent is None else parent.number,
            "given": given,
            "added": json.dumps(added),
            "told": telling.tools,
            "template": telling.template,
            "stop": list(stop),
            "calls": calls,
        }
        said = [*(parent.said if parent else ()), *added]
        stream = turn_stream(work.lease, session.place, number)
        request = TurnRequest(
            key=key, prompt=as_bytes(prompt.tobytes()), sampling=sampling, stream=stream,
            known=routed_before(len(prompt), len(given)), note=as_bytes(wire.pack(note)),
            **_shown_to_engines(session, spliced),
        )  # fmt: skip
        if files:
            await self._records.keep_pictures(work, files)
        answer = await self._answered(request)
        turn = Turn(number, None if parent is None else parent.number, given, answer, said, telling)
        turn.asked, turn.prompt_tokens = asked, len(prompt)
        tools = telling.tools if calls else ""
        turn.message, turn.stopped_by = self._replies.message(
            work.lease, session.place, number, answer, tools, stop, given, is_chat(said)
        )  # fmt: skip
        turn.said, turn.pictures = [*said, canonical(turn.message)], pictures
        if held.life == session.life and not session.ended:
            session.turns[number] = turn
        return turn

    async def _answered(self, request: TurnRequest) -> Answer:
        """However long that takes: who waits for it has a deadline of his own, and may ask for the same turn again.
        Raises `AgentError`."""
        found: Message | None = None
        while found is None:
            asked = self._say(request, self._config.turn_s)  # raises where nothing can be said any more
            try:
                found = await asyncio.wrap_future(asked)
            except DeadlineError:  # the broker has one turn of this key, however often it is asked for
                log.warning("a turn is late", group=request.key.number, place=request.key.place, turn=request.key.turn)
        assert isinstance(found, TurnAnswer)
        if found.error.endswith(UNANSWERED):
            raise AgentError(503, "no_answer", f"the policy has not answered this: {found.error}; ask again", LOST_S)
        if found.error:
            raise AgentError(400, "cannot_answer", f"the policy cannot answer this: {found.error}")
        return unpack_answer(found.answer.tobytes())

    def _sampling(self, work: Work, session: Session, size: int, max_tokens: int | None, stop: Sequence[str]) -> Any:
        """The run's own: what is trained on must have been drawn as the run draws. Shorter, where the agent says so."""
        own = work.lease.sampling
        new = own.room(size, self._max_length)
        new = min(new, max_tokens or new)
        if new < 1 and self._max_length is not None:
            why = f"no room is left of the {self._max_length} that rollout.engine and the model take"
            raise no_room(size + 1, self._max_length, why)
        greedy = session.place == own.n  # the group's baseline
        return own.one(greedy, max_new_tokens=new, stop=(*own.stop, *stop))


def _shown_to_engines(session: Session, spliced: Spliced) -> dict[str, Any]:
    """All pictures of a conversation, and which of its tokens were sampled; nothing where it has no pictures."""
    pictures = *session.pictures(spliced.parent), *spliced.pictures
    if not pictures:
        return {}
    sampled = [np.zeros(0, bool)]
    for turn in session.path(spliced.parent):
        sampled += [np.zeros(len(turn.given), bool), np.ones(len(turn.answer.tokens), bool)]
    whole = np.concatenate([*sampled, np.zeros(len(spliced.given), bool)])
    return {"pictures": [as_bytes(picture) for picture in pictures], "sampled": as_bytes(whole.tobytes())}


def _words(message: Mapping[str, Any]) -> dict[str, Any]:
    """``message`` less the pictures that it shows."""
    content = message.get("content")
    parts = [part for part in content if "picture" not in part] if isinstance(content, list) else content
    return {**message, "content": parts}
