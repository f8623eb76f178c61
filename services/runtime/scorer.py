"""The loop that all scorers share: groups in, columns out, as many at once as the scorer has room for.

    left = scorer.score(tasks, answer)   what `Scorer` does: answer(task, column, values), at once or later, from any
                                         thread; the tasks that are left are given to it again in the loop's next turn

Each column of each group is answered by itself, as soon as it is there. What was answered is said until the broker has
called it durable; what this process was given is given to another when it dies.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import structlog

from penstock.protocols.experience import ExperienceError, Group, Purpose, summarize
from penstock.protocols.mailbox import DeadlineError
from penstock.protocols.messages import Credit, HelloNeeded, Message, Score, Scores, Stop, Work, WorkItem
from penstock.protocols.packed_groups import unpack_group
from penstock.protocols.wire import WireError
from penstock.services.runtime import health
from penstock.services.runtime.actor import Actor, ActorContext
from penstock.services.runtime.device_turn import LOOK_S
from penstock.services.runtime.plain import visible
from penstock.services.runtime.watchdog import ended_if_hung

log = structlog.get_logger()

ANSWER_DEADLINE_S = 120.0
HUNG_S = 1800.0
"""A scorer that has not come back for so long is ended; far more than any computes, or reads a model from files."""
NOTHING = np.zeros(0, np.float32)

Key = tuple[Purpose, int]


@dataclass(frozen=True)
class ScoringTask:
    """One finished group, and the columns that it lacks."""

    key: Key
    group: Group
    wanted: tuple[str, ...]
    columns: dict[str, np.ndarray]
    """Those that the wanted ones read: ``[trajectories]``, or ``[tokens of all trajectories]``."""
    step: int
    """Steps committed when it was offered."""
    since: float = field(default_factory=time.monotonic)


Answer = Callable[..., None]
"""``answer(task, column, values, errors=(), unusable="", ends=None)``: values as the column declares them; ``errors``
say why some are NaN; or, instead of values, why the group is ``unusable``: it is dropped; or the error that ``ends``
this process, since it can score no more: others, or the next, are given what it has in hand."""


class Scorer(Protocol):
    """What a scorer does, beside the loop."""

    def room(self, in_hand: int) -> int:
        """How many groups more it can take, while ``in_hand`` are not answered."""

    def score(self, tasks: Sequence[ScoringTask], answer: Answer) -> Sequence[ScoringTask]:
        """Answers every wanted column of the first of ``tasks``, now or later, from any thread; returns those that it
        has not begun. While it computes here nothing is said, asked for or heard: it begins few at once."""

    def gauges(self) -> dict[str, float]:
        """Numbers for the dashboard, asked for from another thread."""

    def close(self) -> None:
        """Ends what it has started."""


class Waking(Protocol):
    """Who says whether a scorer may begin groups: a `device_turn.Guest`, a `sleepers.Caller`, or `All` of some."""

    @property
    def awake(self) -> bool:
        """What `poll` said last."""

    def poll(self) -> bool:
        """Whether it may, up to the next time; called often."""


class All:
    """It may where each of these says so."""

    def __init__(self, *each: Waking) -> None:
        self._each = each

    @property
    def awake(self) -> bool:
        """See `Waking`."""
        return all(one.awake for one in self._each)

    def poll(self) -> bool:
        """See `Waking`."""
        said = [one.poll() for one in self._each]  # each is asked, whatever the others say
        return all(said)


@dataclass(frozen=True)
class _Answered:
    """Posted to the inbox, so that answers of any thread leave in the loop's."""

    key: Key
    column: str
    score: Score


@dataclass(frozen=True)
class _Durable:
    message: Scores
    error: BaseException | None


class ScorerActor:
    """One process of a scorer. `run` returns the reason it ended for."""

    def __init__(
        self,
        kind: str,
        context: ActorContext,
        scorer: Scorer,
        waking: Waking | None = None,
        hung_s: float = HUNG_S,
        hung_key: str = "",
    ) -> None:
        """``waking``: says when it may score, where something that it needs sleeps while the trainer works. ``hung_s``:
        a scorer that has not come back for so long is ended; ``hung_key`` is the config's key of it, where there is
        one."""
        self.actor = Actor(kind, context)
        self._scorer, self._waking = scorer, waking
        self._hung_s, self._hung_key = hung_s, hung_key
        self._waiting: list[WorkItem] = []
        """What has come in, and is not begun: it may be asleep."""
        self._left: Sequence[ScoringTask] = ()
        """What the scorer has not begun."""
        self.actor.measure = lambda: {"groups_in_hand": len(self._open), **scorer.gauges()}
        self._open: dict[Key, set[str]] = {}
        """Columns that are not durable yet, of what is in hand."""
        self._received = self._credited = self._hello = 0

    def run(self) -> str:
        """Scores until it is told to stop."""
        self.actor.join()
        self._forget_credit()
        try:
            with ended_if_hung(self.actor.context.name, self._hung_s, self._hung_key):
                while (reason := self._turn()) is None:
                    pass
            self.actor.leave(reason)
            return reason
        finally:
            self._scorer.close()

    def _turn(self) -> str | None:
        """Handles all that has arrived; returns the reason to stop, if there is one."""
        answered: list[_Answered] = []
        event: object = self.actor.next(self._patience())
        while event is not None:
            if isinstance(event, Stop):
                return event.reason
            # Fenced by the broker, a mailbox that failed, or what an answer `ends` with.
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Work):
                self._received += len(event.items)
                known = set(map(_asked_of, self._waiting))  # offered again, by a broker that was started again
                self._waiting += [item for item in event.items if _asked_of(item) not in known]
                # An answer that became durable just before may have put the same group down.
                self.actor.held.update((item.purpose, item.number) for item in event.items)
            elif isinstance(event, _Answered):
                answered.append(event)
            elif isinstance(event, _Durable):
                self._durable(event)
            elif isinstance(event, HelloNeeded):
                self._forget_credit()
            else:
                log.warning("unexpected message", type=type(event).__name__)
            try:
                event = self.actor.mailbox.inbox.get_nowait()
            except queue.Empty:
                event = None
        self._say(answered)
        if self._waking is None or self._waking.poll():
            items, self._waiting = self._waiting, []
            self._begin(items)
        self.actor.set_busy(bool(self._open))
        self._give_credit()
        return None

    def _patience(self) -> float | None:
        """For how long nothing may happen."""
        if self._left and (self._waking is None or self._waking.awake):
            return 0.0
        return LOOK_S if self._waking else None

    def _forget_credit(self) -> None:
        """The broker counts anew; one that has forgotten what it gave offers it again."""
        if self._hello == self.actor.hellos:
            return  # this is already of that hello, and what came since counts
        self._received, self._credited, self._hello = 0, -1, self.actor.hellos
        self._give_credit()

    def _give_credit(self) -> None:
        total = self._received + max(0, self._scorer.room(len(self._open) + len(self._waiting)))
        if total > self._credited:
            self._credited = total
            self.actor.mailbox.tell(Credit(total=total, hello=self._hello))

    def _begin(self, items: list[WorkItem]) -> None:
        tasks = list(self._left)
        for item in items:
            health.beat()
            key = (item.purpose, item.number)
            wanted = [column for column in item.wanted if column not in self._open.get(key, ())]
            if not wanted:
                continue  # offered again by a broker that was started again, and still at work here
            self._open.setdefault(key, set()).update(wanted)
            try:
                tasks.append(ScoringTask(key, _decode(item), tuple(wanted), item.columns, item.step))
            except (ExperienceError, WireError) as error:
                log.error("a group cannot be scored", group=item.number, error=str(error))
                self._say([_Answered(key, column, self._score(key, unusable=str(error))) for column in wanted])
        self._left = self._scorer.score(tasks, self._answer) if tasks else ()

    def _answer(
        self,
        task: ScoringTask,
        column: str,
        values: np.ndarray = NOTHING,
        errors: Sequence[str] = (),
        unusable: str = "",
        ends: Exception | None = None,
    ) -> None:
        if ends is not None:
            self.actor.mailbox.post(ends)
            return
        seconds = time.monotonic() - task.since
        errors, unusable = [visible(each) for each in errors], visible(unusable)  # what is no text cannot be sent
        score = self._score(task.key, values=values, errors=errors, unusable=unusable, seconds=seconds)
        self.actor.mailbox.post(_Answered(task.key, column, score))

    @staticmethod
    def _score(key: Key, values: np.ndarray = NOTHING, errors: Sequence[str] = (), **more: object) -> Score:
        return Score.model_validate(
            {"purpose": key[0], "number": key[1], "values": values, "errors": list(errors), **more}
        )

    def _say(self, answered: list[_Answered]) -> None:
        by_column: dict[str, list[Score]] = {}
        for answer in answered:
            by_column.setdefault(answer.column, []).append(answer.score)
        for column, scores in by_column.items():
            self._send(Scores(column=column, scores=scores))

    def _send(self, message: Scores) -> None:
        def durable(future: Future[Message]) -> None:
            self.actor.mailbox.post(_Durable(message, future.exception()))

        self.actor.mailbox.ask_later(message, ANSWER_DEADLINE_S).add_done_callback(durable)

    def _durable(self, event: _Durable) -> None:
        if isinstance(event.error, DeadlineError):
            log.warning("not durable yet; sending again", column=event.message.column, error=str(event.error))
            self._send(event.message)
            return
        if event.error:
            log.error("the broker refused scores", column=event.message.column, error=str(event.error))
        for score in event.message.scores:
            key: Key = (score.purpose, score.number)
            columns = self._open.get(key, set())
            columns.discard(event.message.column)
            if not columns:
                self._open.pop(key, None)
                if all((item.purpose, item.number) != key for item in self._waiting):  # it has come again
                    self.actor.put_down(*key)


def _asked_of(item: WorkItem) -> tuple[Key, tuple[str, ...]]:
    """The group, and the columns that are wanted."""
    return (item.purpose, item.number), tuple(item.wanted)


def _decode(item: WorkItem) -> Group:
    """The group, every rule checked. Raises `ExperienceError` where it is not what its rollout said."""
    group = unpack_group(item.experience.data)
    found = summarize(group)
    said = (item.number, item.trajectories, item.tokens, item.oldest)
    if (group.number, found.trajectories, found.tokens, max(found.oldest, 0)) != said:
        raise ExperienceError(f"group {item.number}: its experience is that of another ({found}, not {said})")
    return group
