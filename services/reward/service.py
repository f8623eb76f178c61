"""The reward scorer: a column for each number of a reward function, a call for each trajectory."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import structlog

from penstock.protocols.experience import Trajectory, sessions_of
from penstock.services.reward.config import ENVIRONMENT, FunctionConfig, RewardConfig
from penstock.services.reward.function import of_prompt
from penstock.services.reward.groups import apart, together
from penstock.services.reward.other_forms import more_of_prompt
from penstock.services.runtime import allowance
from penstock.services.runtime.actor import ActorContext
from penstock.services.runtime.scorer import Answer, ScorerActor, ScoringTask
from penstock.services.runtime.sleepers import caller
from penstock.services.user_processes.pool import WorkerPool
from penstock.services.user_processes.worker import Call, ProgramError, Worker

log = structlog.get_logger()

MOST_WORKERS = 32
"""Of each plain function, unless `reward.workers` says more: each has loaded it."""
LATE = " late"


class Reward:
    """Runs reward functions. One's columns are answered when its own calls are done, whatever the others do."""

    def __init__(self, config: RewardConfig, workers: int, group_size: int, held: bool = False) -> None:
        """``held``: what may ask programs is waited for, again and again (`hold`)."""
        self._limit, self._group_size = config.concurrency, group_size
        self._functions = {function.column: function for function in config.functions}
        self._written_by = {column: function.column for function in config.functions for column in function.terms}
        programs = {
            function.column: function.program(f"reward.functions.{index}", config.count)
            for index, function in enumerate(config.functions)
            if function.function != ENVIRONMENT
        }
        may_ask = {column: self._functions[column].may_ask for column in programs}
        begun = {column: Worker(program) for column, program in programs.items()}  # all are loaded at once
        self._pools = {
            column: WorkerPool(program, workers, config.concurrency, begun[column], not (held and may_ask[column]))
            for column, program in programs.items()
        }
        self._asking = [pool for column, pool in self._pools.items() if may_ask[column]]
        self._failed: Counter[str] = Counter()
        """Calls without a reward, by column; those that were too late by column and `LATE`."""

    def room(self, in_hand: int) -> int:
        """As many groups as fill the fullest function's calls."""
        most = max((pool.outstanding for pool in self._pools.values()), default=0)
        return -(-(self._limit - most) // self._group_size)

    def score(self, tasks: Sequence[ScoringTask], answer: Answer) -> Sequence[ScoringTask]:
        """Submits all calls, and returns at once."""
        for task in tasks:
            every = task.group.trajectories
            offered = {k: _offered(task, k) for k, t in enumerate(every) if not t.failure}
            last = last_of_session(every)
            for column in dict.fromkeys(self._written_by[wanted] for wanted in task.wanted):
                if column not in self._pools:
                    self._pass_on(task, column, answer)
                    continue
                pool, function = self._pools[column], self._functions[column]
                stands_for = last if function.branches == "last" else np.arange(len(every))
                asked = {k: _as_asked(function, task, k, offered[k]) for k in offered if stands_for[k] == k}
                answering = _Answering(self, task, function, list(asked), stands_for, answer)
                if not asked:
                    answering.finish()
                elif function.whole_group:
                    answering.begin_together(pool, Call(together(list(asked.values()))))
                else:
                    answering.begin(pool, [Call(each) for each in asked.values()])
        return ()

    def _pass_on(self, task: ScoringTask, column: str, answer: Answer) -> None:
        """What the environment gave, by token: 0 where a prompt was played in none; NaN on the last token of a
        trajectory that has failed."""
        parts = [
            np.zeros(len(t.tokens), np.float32) if not t.rewards.size else t.rewards.copy()
            for t in task.group.trajectories
        ]
        for values, trajectory in zip(parts, task.group.trajectories, strict=True):
            if trajectory.failure:
                values[-1] = np.nan
        answer(task, column, np.concatenate(parts), self.spoilt(task, column))

    def spoilt(self, task: ScoringTask, column: str) -> list[str]:
        """Why trajectories have no reward whatever a function would say of them: an environment or an agent has failed.
        They are counted."""
        failures = [trajectory.failure for trajectory in task.group.trajectories if trajectory.failure]
        for failure in failures:
            self.failed(column, failure)
        return [f"{column.partition('/')[2]} {failure}" for failure in failures]

    def gauges(self) -> dict[str, float]:
        """Calls under way and waiting, over all functions and of each; failures and restarts so far."""
        found: dict[str, float] = {
            "calls_in_flight": sum(pool.under_way for pool in self._pools.values()),
            "calls_outstanding": sum(pool.outstanding for pool in self._pools.values()),
            "worker_restarts": sum(pool.restarts for pool in self._pools.values()),
        }
        for column, pool in self._pools.items():
            found[f"calls_in_flight/{column}"] = pool.under_way
            if self._failed[column]:
                found[f"calls_failed/{column}"] = self._failed[column]
                found[f"calls_timed_out/{column}"] = self._failed[column + LATE]
        return found

    @property
    def asks(self) -> bool:
        """Some functions may ask programs."""
        return bool(self._asking)

    @property
    def under_way(self) -> int:
        """Calls of functions that may ask programs, which workers have: see `sleepers.Calls`."""
        return sum(pool.under_way for pool in self._asking)

    def hold(self) -> None:
        """Begins none of these from now on."""
        for pool in self._asking:
            pool.hold()

    def go(self) -> None:
        """Begins them again."""
        for pool in self._asking:
            pool.go()

    def close(self) -> None:
        """Ends all workers."""
        for pool in self._pools.values():
            pool.close()

    def failed(self, column: str, error: str) -> None:
        """Counts a call without a reward, as soon as it is one: its group may be long in coming."""
        self._failed[column] += 1
        self._failed[column + LATE] += "timed out" in error


class _Answering:
    """One function's columns of one group: answered when the last of its calls is. ``judged``: the trajectories that
    have a call; ``stands_for`` int64 ``[trajectories]``: whose is each one's. The others have failed, and have no
    reward."""

    def __init__(
        self, reward: Reward, task: ScoringTask, function: FunctionConfig, judged: list[int], stands_for: np.ndarray,
        answer: Answer,
    ) -> None:  # fmt: skip
        self._reward, self._task, self._answer = reward, task, answer
        self._column, self._columns = function.column, list(function.terms)
        self._values = np.full((len(self._columns), len(task.group.trajectories)), np.nan, np.float32)
        self._errors = reward.spoilt(task, self._column)
        self._judged, self._left, self._stands_for = judged, len(judged), stands_for
        self._lock = threading.Lock()

    def begin(self, pool: WorkerPool, calls: list[Call]) -> None:
        for sample, call in zip(self._judged, calls, strict=True):
            pool.submit(call).add_done_callback(lambda future, sample=sample: self._done(sample, future))  # type: ignore[misc]

    def begin_together(self, pool: WorkerPool, call: Call) -> None:
        """Of one call for all."""
        pool.submit(call).add_done_callback(self._all_done)

    def _all_done(self, future: Future[list[dict[str, Any]]]) -> None:
        for sample, each in zip(self._judged, apart(future, len(self._judged)), strict=True):
            self._done(sample, each)

    def _done(self, sample: int, future: Future[list[float]]) -> None:
        error = future.exception()
        with self._lock:
            if error is None:
                self._values[:, sample] = future.result()
            elif isinstance(error, ProgramError | OSError):  # nothing can be called; no call has failed
                self._answer(self._task, self._column, ends=error)
                return
            else:
                self._errors.append(f"{self._column.partition('/')[2]} {error}")
                self._reward.failed(self._column, str(error))
                log.warning("reward failed", group=self._task.key[1], trajectory=sample, error=self._errors[-1])
            self._left -= 1
            if self._left:
                return
        self.finish()

    def finish(self) -> None:
        """Nothing is waited for."""
        for column, values in zip(self._columns, self._values[:, self._stands_for], strict=True):
            if column in self._task.wanted:
                self._answer(self._task, column, values, self._errors)


def last_of_session(trajectories: Sequence[Trajectory]) -> np.ndarray:
    """int64 ``[trajectories]``: of each the last branch of its agent's session, itself where it is alone."""
    sessions = sessions_of([trajectory.session for trajectory in trajectories])
    last = {session: number for number, session in enumerate(sessions.tolist())}
    return np.array([last[session] for session in sessions.tolist()], np.int64)


def _offered(task: ScoringTask, sample: int) -> dict[str, Any]:
    """What any function may ask for about one trajectory: see `function.OFFERED` and `other_forms`."""
    trajectory = task.group.trajectories[sample]
    return (
        of_prompt(task.group.prompt)
        | more_of_prompt(task.group.prompt)
        | {
            "response": trajectory.text,
            "response_tokens": trajectory.sampled,
            "turns": list(trajectory.turns) or [trajectory.text],
            "pictures": list(trajectory.pictures),
            "finish_reason": trajectory.finish,
            "group": task.key[1],
            "sample": sample,
            "step": task.step,
        }
    )


def _as_asked(config: FunctionConfig, task: ScoringTask, sample: int, offered: dict[str, Any]) -> dict[str, Any]:
    """What is offered to all, as the function's config wants it: with the columns that it names, the trajectory's own
    part of each, its part of the truth, and what it reads of the answer."""
    read = {"truth": config.truth_of(offered["truth"])}
    read |= {"response": config.response_of(offered["response"], offered["turns"])}
    return offered | read | {name.replace("/", "_"): _part(task, name, sample) for name in config.columns}


def _part(task: ScoringTask, column: str, sample: int) -> Any:
    trajectories: Sequence[Trajectory] = task.group.trajectories
    values = task.columns[column]
    if len(values) == len(trajectories):
        return values[sample].item()
    start = sum(len(t.tokens) for t in trajectories[:sample])
    return values[start : start + len(trajectories[sample].tokens)]


def make(context: ActorContext, config: Any, kind: str) -> ScorerActor:
    """The actor, for a run's whole config."""
    workers = config.reward.workers or allowance.spare_cores(config, config.reward.count, MOST_WORKERS)
    reward = Reward(config.reward, workers, config.sampling.trajectories, bool(config.sleepers))
    if reward.asks and (asks := caller(context, config, reward)):
        asks.start()
    return ScorerActor(kind, context, reward)
