"""Groups of prompts that an environment answers turn by turn.

reset ──▶ generate ──▶ step ──▶ done, or no turn or room is left ──▶ a trajectory
             ▲           │
             └─ observed ┘
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import structlog

from penstock.protocols.experience import Group, Trajectory
from penstock.protocols.measured import added, fault
from penstock.protocols.messages import Lease
from penstock.services.data.picture_files import MOST_OF_GROUP
from penstock.services.environments.begun import begun_with
from penstock.services.environments.call_reading import told_of
from penstock.services.environments.config import KEY, EnvironmentConfig
from penstock.services.environments.past import MOST_LOST
from penstock.services.environments.pool import EnvironmentPool
from penstock.services.environments.sessions import LOST
from penstock.services.environments.tool_calls import as_called
from penstock.services.rollout.engines.base import Completion, Engine, Refusal, Request, RequestError
from penstock.services.rollout.group_maker import Made, handle_of
from penstock.services.turns.joining import join, placed, routed_before
from penstock.services.turns.room import too_long
from penstock.services.turns.streams import turn_stream
from penstock.services.turns.tokenizer import Tokenizer
from penstock.services.turns.tool_calls import FORMS

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Session:
    """One trajectory on its way."""

    work: _Work
    place: int
    number: int
    """What the environment's pool calls it."""
    parts: list[np.ndarray | Completion]
    chat: bool = False
    tools: list[dict[str, Any]] | None = None
    """What the policy is told of."""
    rewards: list[float] = field(default_factory=list)
    """Of the turns that are over."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Theirs, added up."""
    lost: int = 0
    pictures: tuple[bytes, ...] = ()
    """What it shows so far."""
    answered: int = 0
    """So many of them were there when the policy spoke last."""

    @property
    def turns(self) -> list[Completion]:
        """What was sampled so far."""
        return [part for part in self.parts if isinstance(part, Completion)]

    @property
    def before(self) -> np.ndarray:
        """int32: what was told before the last answer."""
        given = self.parts[-2]
        assert isinstance(given, np.ndarray), "answers follow what they answer"
        return given

    @property
    def tokens(self) -> np.ndarray:
        """int32: all of it so far."""
        return np.concatenate([part.tokens if isinstance(part, Completion) else part for part in self.parts])

    @property
    def sampled(self) -> np.ndarray:
        """bool ``[tokens]``: which of them."""
        said = [(p.tokens, True) if isinstance(p, Completion) else (p, False) for p in self.parts]
        return np.concatenate([np.full(len(tokens), sampled) for tokens, sampled in said])

    @property
    def greedy(self) -> bool:
        """It is its group's baseline."""
        return self.place == self.work.lease.sampling.n


@dataclass(slots=True, eq=False)
class _Work:
    """A group that is being made."""

    lease: Lease
    tokens: np.ndarray
    """Of the prompt as it was leased."""
    done: dict[int, Trajectory] = field(default_factory=dict)
    """By place in the group."""


@dataclass(frozen=True)
class _Said:
    """What the environment answered."""

    session: _Session
    number: int
    op: str
    found: dict[str, Any] | None
    error: str


class MultiTurn:
    """See `group_maker.GroupMaker`. ``post`` puts an event into the rollout's inbox, from any thread; ``max_length``:
    tokens that a trajectory may have, None where the engine alone knows; ``key``: where the environment stands in the
    config; ``numbers`` are what the engine is to call requests by."""

    def __init__(
        self,
        engine: Engine,
        text: Tokenizer,
        config: EnvironmentConfig,
        max_length: int | None,
        post: Callable[[object], None],
        key: str = KEY,
        numbers: Iterator[int] | None = None,
    ) -> None:
        self._engine, self._text, self._config, self._max_length, self._post = engine, text, config, max_length, post
        self._marks = config.tools is not None and config.tools.tool_calls not in FORMS
        """Special tokens are read, too, where calls are looked for."""
        reads = told_of(text) if self._marks else None
        self._pool, self._settles = EnvironmentPool(config, key, reads), config.settles
        self._work: dict[int, _Work] = {}
        self._generating: dict[int, _Session] = {}
        """By the number of the request that the engine has."""
        self._numbers = numbers or count(1)
        self._sessions = self._failed = 0

    def start(self, lease: Lease) -> Made | None:
        """See `GroupMaker.start`."""
        work = self._work[handle_of(lease)] = _Work(lease, self._text.encode(lease.prompt))
        for place in range(lease.sampling.trajectories):
            self._begin(_Session(work, place, 0, []))
        return None

    def has(self, lease: Lease) -> bool:
        """See `GroupMaker.has`."""
        return handle_of(lease) in self._work

    def take(self, result: Completion | Refusal) -> Made | None:
        """See `GroupMaker.take`."""
        session = self._generating.pop(result.number, None)
        if session is None:
            return None
        if isinstance(result, Refusal):
            return self._refused(session, result.reason)
        session.parts.append(result)
        session.answered = len(session.pictures)
        tokens = result.tokens.tolist()
        answer, marks = self._text.decode([tokens])[0], ("", "")
        if self._marks:
            marks = self._text.decode_marked(tokens), self._text.decode_whole(session.before)
        heard = self._hear(session, "step")
        self._pool.step(session.number, answer, heard, result.finish, self._thought(session), *marks)
        return None

    def heard(self, event: object) -> Made | None:
        """See `GroupMaker.heard`."""
        if not isinstance(event, _Said):
            raise TypeError(f"unexpected event {type(event).__name__}")
        session = event.session
        if event.number != session.number:
            return None  # of before it began again
        if event.error == LOST and session.lost < MOST_LOST:
            session.lost += 1
            self._begin(session)
            return None
        if event.found is None:
            why = "its worker died too often" if event.error == LOST else event.error
            return self._end(session, failure=f"{event.op} {why}" if event.error != LOST else why)
        if event.op == "reset":
            return self._prompted(session, event.found)
        if event.op == "finish":
            session.rewards[-1] += event.found["reward"] or 0.0
            return self._end(session)
        return self._stepped(session, event.found)

    def gauges(self) -> dict[str, float]:
        """See `GroupMaker.gauges`."""
        return {
            "environment_calls": self._pool.under_way,
            "environment_failed": self._failed,
            "environment_restarts": self._pool.restarts,
        }

    def close(self) -> None:
        """See `GroupMaker.close`."""
        self._pool.close()

    def _begin(self, session: _Session) -> None:
        """From the start, whatever it had."""
        self._sessions += 1
        session.number, session.parts, session.rewards, session.metrics = self._sessions, [], [], {}
        self._pool.reset(session.number, session.work.lease.prompt, self._hear(session, "reset"))

    def _hear(self, session: _Session, op: str) -> Callable[[dict[str, Any] | None, str], None]:
        number = session.number
        return lambda found, error: self._post(_Said(session, number, op, found, error))

    def _prompted(self, session: _Session, found: dict[str, Any]) -> Made | None:
        if reason := self._too_long([found["prompt"], found["tools"]]):
            return self._refused(session, reason)
        try:
            prompt = begun_with(session.work.lease.prompt, found)
            session.chat, session.pictures = prompt.messages is not None, prompt.pictures
            session.tools = found["tools"] or prompt.tools
            tokens = self._text.encode(prompt, session.tools)
        except Exception as error:  # a template may raise anything
            return self._end(session, failure=f"the prompt cannot be used: {error}")
        session.parts.append(tokens)
        return self._generate(session)

    def _stepped(self, session: _Session, found: dict[str, Any]) -> Made | None:
        session.rewards.append(found["reward"])
        session.metrics = added(session.metrics, found["metrics"])
        if why := fault(session.metrics):
            session.metrics = {}
            return self._end(session, failure=f"metrics of the session: {why}")
        last = session.turns[-1]
        if found["done"]:
            return self._end(session, finish_of=last)
        if len(session.turns) >= self._config.max_turns:
            return self._cut(session)
        if reason := self._too_long(found["observation"]):
            return self._refused(session, reason)
        try:
            pictures = tuple(found["pictures"])
            room = MOST_OF_GROUP // session.work.lease.sampling.trajectories
            if pictures and (shown := sum(map(len, {*session.pictures, *pictures}))) > room:
                raise ValueError(
                    f"it would show {shown:,} bytes of pictures, and a trajectory of this group at most {room:,}"
                )
            told = self._observed(session, found["observation"], last, pictures)
            # A picture's own tokens in words alone would be taken for a part of one, once any is shown.
            bare = [told] if session.pictures and not pictures else []
            if pictures and not session.pictures:
                bare = [part for part in session.parts if isinstance(part, np.ndarray)]
            self._text.check_bare(bare)
            session.parts.append(told)
            session.pictures += pictures
        except Exception as error:  # a template may raise anything
            return self._end(session, failure=f"an observation cannot be used: {error}")
        return self._generate(session)

    def _thought(self, session: _Session) -> bool:
        """The template had begun a thought before the last answer."""
        return self._text.begins_thought(session.before)

    def _observed(self, session: _Session, said: Any, last: Completion, pictures: Sequence[bytes]) -> np.ndarray:
        """int32 ``[tokens]`` of what is ``said`` to the answer ``last``."""
        answer, text = None, self._text.telling(session.work.lease.prompt.chat_template_kwargs)
        if session.chat and not isinstance(said, str) and any(message["role"] == "tool" for message in said):
            form = self._config.tools.form if self._config.tools else "hermes"
            words = self._text.decode([last.tokens.tolist()])[0]
            answer, said = as_called(words, form, said, len(session.turns), self._thought(session))
        return text.observe(said, session.chat, int(last.tokens[-1]), answer, pictures, session.tools)

    def _too_long(self, said: Any) -> str:
        """See `room.too_long`: this thread is the engine's too."""
        return too_long(len(json.dumps(said, ensure_ascii=False, default=str)), self._max_length)

    def _generate(self, session: _Session) -> Made | None:
        lease, tokens = session.work.lease, session.tokens
        new = lease.sampling.room(len(tokens), self._max_length)
        if new < 1:
            full = f"no room is left of the {self._max_length} tokens that rollout.engine and the model take"
            return self._refused(session, full)
        stream = turn_stream(lease, session.place, len(session.turns))
        given = session.parts[-1]
        assert isinstance(given, np.ndarray)
        number = next(self._numbers)
        try:
            sampling = lease.sampling.one(session.greedy, max_new_tokens=new)
            known = routed_before(len(tokens), len(given))
            said = session.sampled if session.pictures else None
            self._engine.submit(
                Request(
                    number, lease.seed, tokens, sampling, stream, known, pictures=session.pictures,
                    sampled=said, unread=lease.purpose == "eval",
                )
            )  # fmt: skip
        except RequestError as error:
            return self._refused(session, str(error))
        self._generating[number] = session
        return None

    def _refused(self, session: _Session, reason: str) -> Made | None:
        """The engine cannot go on. What was said so far counts, if there is something."""
        if not session.turns:
            return self._end(session, failure=reason)
        if session.parts[-1] is not session.turns[-1]:
            session.parts.pop()  # what nobody answers is not part of it
            session.pictures = session.pictures[: session.answered]
        return self._cut(session)

    def _cut(self, session: _Session) -> Made | None:
        """Ends it, though its task has not: its object may give a reward all the same."""
        if not self._settles:
            return self._end(session)
        self._pool.finish(session.number, self._hear(session, "finish"))
        return None

    def _end(self, session: _Session, finish_of: Completion | None = None, failure: str = "") -> Made | None:
        work, handle = session.work, handle_of(session.work.lease)
        self._pool.end(session.number)
        if self._work.get(handle) is not work:
            return None  # another of its trajectories has broken the rules
        if failure:
            self._failed += 1
            log.warning("environment failed", group=work.lease.number, trajectory=session.place, error=failure)
        try:
            work.done[session.place] = self._trajectory(session, finish_of, failure)
        except Exception as error:  # an engine's numbers that break a trajectory's rules, say
            del self._work[handle]
            return work.lease, f"{type(error).__name__}: {error}"
        if len(work.done) < work.lease.sampling.trajectories:
            return None
        del self._work[handle]
        trajectories = [work.done[place] for place in range(len(work.done))]
        return work.lease, Group(work.lease.number, work.lease.prompt, trajectories)

    def _trajectory(self, session: _Session, finish_of: Completion | None, failure: str) -> Trajectory:
        parts = session.parts or [session.work.tokens]
        words = self._text.decode([turn.tokens.tolist() for turn in session.turns])
        rest = np.concatenate([p.tokens if isinstance(p, Completion) else p for p in parts[1:]] or [np.zeros(0, int)])
        whole = self._text.decode([rest.tolist()])[0]
        rewards = placed(parts, session.rewards)
        finish = finish_of.finish if finish_of else "length"
        shown = session.pictures if session.parts else session.work.lease.prompt.pictures
        made = join(parts, whole, finish, rewards, tuple(words), failure, session.greedy, pictures=shown)
        return replace(made, metrics={} if failure else session.metrics)
