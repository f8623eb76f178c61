"""A scorer of the user's own: a class that a config names under ``scorers``.

class Surprise:                                   # scorers: {surprise: {scorer: "my_module:Surprise", …}}
    def __init__(self, scale=1.0): ...            # the config's options

    def score_group(self, group, columns):        # protocols.experience.Group; the columns that the config reads
        return {"surprise": -np.concatenate([t.logprobs for t in group.trajectories])}
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import structlog
from pydantic import Field, model_validator

from penstock.protocols.columns import Column, ColumnError, Per, top_columns
from penstock.services.runtime import device_turn, health
from penstock.services.runtime.actor import ActorContext
from penstock.services.runtime.device_turn import Guest
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.plugins import load_plugin
from penstock.services.runtime.scorer import All, Answer, Key, ScorerActor, ScoringTask
from penstock.services.runtime.settings import Section
from penstock.services.runtime.sleepers import NoCalls, caller

log = structlog.get_logger()

AT_ONCE_S = 0.05
"""What takes less is said together."""
FAILED_IN_A_ROW = 8
"""So many different groups that a process cannot score, with none between that it can, are its own fault, most
probably."""


class BrokenScorerError(RuntimeError):
    """A process fails on whatever it is given: another one may do better, so that it is no reason to end the run."""


BUILT_IN = {
    "reward_model": "penstock.services.modeling.reward_model:RewardModel",
    "teacher": "penstock.services.modeling.teacher:Teacher",
    "served_teacher": "penstock.services.modeling.served_teacher:ServedTeacher",
}
"""Scorers by name."""
TEACHERS = ("teacher", SERVED := "served_teacher")
SERVED_S = 600.0
"""That a served one has for an answer, unless `options.seconds` says more."""


class ScorerConfig(Section):
    """A scorer: processes that add columns to finished groups, by a class of your own or one that is built in."""

    scorer: str
    """``module:Class`` with a method ``score_group(group, columns)`` that returns a map from column to values
    (float32), e.g. ``my_module:Surprise``; or ``reward_model``, a model of transformers that grades answers, or
    ``teacher``, one that says how likely each token is (with `top_k` among its options, which others would be), or
    ``served_teacher``, one that a server of vLLM's has."""
    columns: dict[str, Per] = Field(min_length=1)
    """The columns that it writes, and whether each has a value for every ``trajectory`` or for every ``token`` (of all
    trajectories, one after the other), e.g. ``{surprise: token}``."""
    reads: list[str] = []
    """Columns of other scorers that it is given, and waits for, e.g. ``[reference]``."""
    sources: list[str] = []
    """Sources of prompts whose groups it is given, e.g. ``[math]``, as of a reward function; a teacher for each source
    is a scorer for each. Empty: all."""
    count: int = Field(1, ge=1)
    """Processes, e.g. ``2``."""
    threads: int = Field(1, ge=1)
    """Compute threads of each."""
    gpus: int = Field(0, ge=0)
    """GPUs of each process, e.g. ``1``; of several the layers of a built-in scorer's model are dealt out over them, as
    with `reference.gpus`."""
    own_gpus: bool = True
    """Whether they are its own also with `run.placement`: colocated, e.g. ``false``: a process has as many of the
    trainer's then, and sleeps while a learner works, as built-in scorers can, and classes with ``sleep()`` and
    ``wake()``. See docs/memory.md."""
    groups_in_hand: int = Field(64, ge=1)
    """Groups that one process asks for at once."""
    timeout_s: float = Field(900.0, ge=2)
    """Seconds. A group, or all that are scored together (``score_groups``), that take longer end their process, which
    says where it was, and another one begins, e.g. ``60`` for a class that asks a server."""
    options: dict[str, Any] = {}
    """Arguments of the class, e.g. ``{scale: 2.0}``. A built-in one's ``column`` is the first of `columns`, and a
    teacher's ``temperature`` that of `rollout.sampling`, where they are not given."""

    @property
    def implementation(self) -> str:
        """``module:Class``, also of a built-in one."""
        return BUILT_IN.get(self.scorer, self.scorer)

    @property
    def built_in(self) -> bool:
        """It is no class of the user's."""
        return self.scorer in BUILT_IN

    def declared(self, kind: str) -> list[Column]:
        """The columns, as the scorer called ``kind`` writes them."""
        more: dict[str, Any] = {"reads": tuple(self.reads), "source": f"scorer {self.scorer}"}
        more["sources"] = tuple(self.sources)
        found = [Column(name=name, scorer=kind, per=per, **more) for name, per in self.columns.items()]
        return found + self._tops(kind, more)

    def _tops(self, kind: str, more: dict[str, Any]) -> list[Column]:
        """Where its own column is not declared, the look before a run says so."""
        there = self.top_k and self.writes in self.columns
        return list(top_columns(self.writes, self.top_k, kind, **more)) if there else []

    @property
    def may_ask(self) -> bool:
        """It may ask a program beside the run."""
        return self.scorer == SERVED or not self.built_in

    @property
    def bound(self) -> tuple[str, float]:
        """The key of what bounds a call of one that asks a program, and its seconds."""
        if self.scorer != SERVED:
            return "timeout_s", self.timeout_s
        given = self.options.get("seconds", SERVED_S)
        return "options.seconds", given if isinstance(given, int | float) else SERVED_S

    @property
    def top_k(self) -> int:
        """How many tokens a built-in teacher says the likeliest of; 0: none, as of any other scorer."""
        return (self.options.get("top_k") or 0) if self.scorer in TEACHERS else 0

    @property
    def writes(self) -> str:
        """The one column of a built-in scorer."""
        return str(self.options.get("column") or next(iter(self.columns)))

    def arguments(self, temperature: float) -> dict[str, Any]:
        """What the class is made with in a run that samples at ``temperature``."""
        if not self.built_in:
            return self.options
        told: dict[str, Any] = {"temperature": temperature} if self.scorer == "teacher" else {}
        told |= {"gpus": self.gpus} if self.gpus > 1 else {}
        given = {name: value for name, value in self.options.items() if value is not None}
        return told | given | {"column": self.writes}

    @model_validator(mode="after")
    def _has_what_it_shares(self) -> ScorerConfig:
        if not self.own_gpus and not self.gpus:
            raise ValueError("own_gpus=false is for processes with a GPU, and gpus=0; set gpus: 1")
        return self

    @model_validator(mode="after")
    def _computes_elsewhere(self) -> ScorerConfig:
        if self.scorer == SERVED and self.gpus:
            raise ValueError(
                f"gpus={self.gpus}: a served_teacher asks a server, and computes nothing here; leave it out (those of "
                "a server that the run starts are programs.NAME.gpus)"
            )
        return self

    @model_validator(mode="after")
    def _a_number_of_tokens(self) -> ScorerConfig:
        if type(self.top_k) is not int or self.top_k < 0:
            raise ValueError(f"options.top_k={self.top_k!r} is no number of tokens; set it to one, e.g. 64, or to null")
        return self


SEVERAL, PARTED = ("at_once", "score_groups"), 3
"""Methods of a class that scores several groups faster than one after the other: how many of the first of some groups
it takes together, and ``score_group`` of each of these; and after how many failures in a row it is given one at a
time."""


def check_methods(made: Any, config: ScorerConfig, key: str) -> None:
    """Raises `SetupError` where ``made``, the class or what it makes, lacks what is called."""
    if not callable(getattr(made, "score_group", None)):
        raise SetupError(f"{key}.scorer: {config.scorer} has no method score_group(group, columns)")
    if not config.own_gpus and not all(callable(getattr(made, name, None)) for name in ("sleep", "wake")):
        raise SetupError(
            f"{key}.own_gpus=false: {config.scorer} has no sleep() and wake(), so it cannot leave its GPU to others; "
            "write both (docs/scoring.md), or set it to true"
        )


class CustomScorer:
    """Calls the user's class, a group at a time, or several where it takes them. What it raises, or returns wrong,
    costs that group alone; of one group after the other, and the process ends and another begins: its device, or
    whom it asks, may be gone. ``temperature``: the run's."""

    def __init__(self, config: ScorerConfig, kind: str, temperature: float = 1.0, alone: bool = False) -> None:
        """``alone``: each group is scored by itself."""
        key = f"scorers.{kind}"
        self._columns = {column.name: column for column in config.declared(kind)}
        self._config = config
        made = load_plugin(config.implementation, f"{key}.scorer")
        try:
            self._scorer = made(**config.arguments(temperature))
        except Exception as error:  # the user's own code
            raise SetupError(f"{key}: {config.scorer} cannot be made: {type(error).__name__}: {error}") from error
        check_methods(self._scorer, config, key)
        self._key = key
        self._several = not alone and all(callable(getattr(type(self._scorer), name, None)) for name in SEVERAL)
        self._singly: set[Key] = set()
        """Groups that could not be scored together."""
        self._parted = 0
        """How often that was so, since it last could."""
        self._failed: set[Key] = set()
        """Groups since the last one that it could score."""

    def room(self, in_hand: int) -> int:
        """See `ScorerConfig.groups_in_hand`."""
        return self._config.groups_in_hand - in_hand

    def score(self, tasks: Sequence[ScoringTask], answer: Answer) -> Sequence[ScoringTask]:
        """Answers one, and as many more as it can begin within `AT_ONCE_S`, before it returns; or those that the class
        takes together. Of these one that it cannot score shows by itself."""
        together, begun = self._together(tasks), time.monotonic()
        if together > 1 and self._score_together(tasks[:together], answer):
            return tasks[together:]
        for place, task in enumerate(tasks):
            if place and time.monotonic() - begun > AT_ONCE_S:
                return tasks[place:]
            self._singly.discard(task.key)
            health.beat()
            try:
                found: dict[str, np.ndarray] | Exception = self._score(task)
            except Exception as error:  # the user's own code
                found = error
            if not self._answered(task, found, answer):
                return tasks[place + 1 :]
        return ()

    def _answered(self, task: ScoringTask, found: dict[str, np.ndarray] | Exception, answer: Answer) -> bool:
        """Whether this process goes on, once it has said what it has ``found`` of a group, or why it has nothing."""
        if not isinstance(found, Exception):
            self._failed.clear()
            for column in task.wanted:
                answer(task, column, found[column])
            return True
        reason = f"{self._config.scorer}: {type(found).__name__}: {found}"
        log.warning("a group cannot be scored", group=task.key[1], error=reason, exc_info=found)
        self._failed.add(task.key)
        if len(self._failed) >= FAILED_IN_A_ROW:
            many = f"{self._key}: {len(self._failed)} groups in a row cannot be scored, the last for {reason}"
            wrong = isinstance(found, ColumnError)  # which it would be in another process, too
            answer(task, task.wanted[0], ends=SetupError(many) if wrong else BrokenScorerError(many))
            return False
        for column in task.wanted:
            answer(task, column, unusable=reason)
        return True

    def gauges(self) -> dict[str, float]:
        """None of its own."""
        return {}

    def sleep(self) -> None:
        """The class gives its device's memory back."""
        self._scorer.sleep()

    def wake(self) -> None:
        """It takes its place there again."""
        self._scorer.wake()

    def close(self) -> None:
        """The class's own ``close``, if it has one."""
        getattr(self._scorer, "close", lambda: None)()

    def _together(self, tasks: Sequence[ScoringTask]) -> int:
        """How many of the first ones."""
        if not self._several or len(tasks) < 2 or tasks[0].key in self._singly:
            return 1
        try:
            return max(1, min(len(tasks), int(self._scorer.at_once([task.group for task in tasks]))))
        except Exception as error:  # the user's own code
            self._several = False
            what = f"{self._config.scorer}: at_once: {type(error).__name__}: {error}"
            log.warning("groups are scored one by one from now on", error=what, exc_info=True)
            return 1

    def _score_together(self, tasks: Sequence[ScoringTask], answer: Answer) -> bool:
        """Whether all could be scored; nothing is answered where not."""
        health.beat()
        try:
            every = self._scorer.score_groups([task.group for task in tasks], [task.columns for task in tasks])
            pairs = zip(tasks, every, strict=True)
            found = [each if isinstance(each, Exception) else self._checked(task, each) for task, each in pairs]
        except Exception as error:  # the user's own code
            what, self._parted = f"{type(error).__name__}: {error}", self._parted + 1
            self._several = self._parted < PARTED
            log.warning("groups cannot be scored together: now one by one", groups=len(tasks), error=what)
            self._singly = {task.key for task in tasks}
            return False
        self._parted = 0
        all(self._answered(task, each, answer) for task, each in zip(tasks, found, strict=True))
        return True

    def _score(self, task: ScoringTask) -> dict[str, np.ndarray]:
        return self._checked(task, self._scorer.score_group(task.group, task.columns))

    def _checked(self, task: ScoringTask, found: Any) -> dict[str, np.ndarray]:
        """What the class has ``found``, of what is wanted. Raises `ColumnError`."""
        if not isinstance(found, dict) or not found.keys() >= set(task.wanted):
            raise ColumnError(f"it returned {type(found).__name__} without {', '.join(task.wanted)}")
        trajectories = task.group.trajectories
        values = {name: np.asarray(found[name], self._columns[name].dtype) for name in task.wanted}
        tokens = sum(len(t.tokens) for t in trajectories)
        for name, array in values.items():
            self._columns[name].check(array, len(trajectories), tokens, task.group.sampled)
        return values


def make(context: ActorContext, config: Any, kind: str) -> ScorerActor:
    """The actor, for a run's whole config."""
    scorer = config.scorers[kind]
    hung = {"hung_s": scorer.timeout_s, "hung_key": f"scorers.{kind}.timeout_s"}
    turn = None
    if config.run.colocated and not scorer.own_gpus:
        turn = device_turn.enter(context.folder, context.name, str(scorer.options.get("device") or "auto"), scorer.gpus)
    made = CustomScorer(scorer, kind, config.rollout.sampling.temperature, config.run.deterministic)
    guest = Guest(turn, made.sleep, made.wake) if turn else None
    asks = caller(context, config, NoCalls()) if scorer.may_ask else None
    waking = All(guest, asks) if guest and asks else guest or asks
    return ScorerActor(kind, context, made, waking, **hung)
