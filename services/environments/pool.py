"""The worker processes of an environment, from the rollout's side: a session stays in the worker that it began in."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, wait
from typing import Any

from penstock.protocols.experience import Finish, Prompt
from penstock.services.environments.config import KEY, EnvironmentConfig
from penstock.services.environments.past import Answered, Past, Replays
from penstock.services.environments.sessions import LOST
from penstock.services.user_processes.work_queue import WorkerQueue
from penstock.services.user_processes.worker import Call

CLOSE_S = 2.0
"""What the objects that are open have at the end to close."""
SHOWS = "shows pictures, and {key}.pictures is false: set it to true, so that engines know before the first comes"
AT_ONCE = 1024
"""Calls that an async environment is given at once."""


class EnvironmentPool:
    """Sessions by number. Raises `ProgramError`, or `ConnectionError` where a server of tools does not start.

    What a call gave is told in another thread. It is `LOST` where the session's worker died by another's doing, and a
    new object, told the same, has not said the same: the session is to begin again."""

    def __init__(self, config: EnvironmentConfig, key: str = KEY, reads: Mapping[str, Any] | None = None) -> None:
        """``key``: where it stands in the config; ``reads``: `call_reading.told_of`, of tools alone."""
        program = config.program(key, reads)
        first = WorkerQueue(program, AT_ONCE)
        count = 1 if first.worker.asynchronous else config.workers or 1
        self._queues = [first, *(WorkerQueue(program, AT_ONCE) for _ in range(count - 1))]
        self._replays = [Replays(first.worker.asynchronous, self._call_first) for _ in self._queues]
        self._open: dict[int, Past] = {}
        self._pictures, self._key = config.pictures, key
        self._closing: set[Future[Any]] = set()
        """Calls of close that have no answer yet."""
        for each in self._queues:
            each.start()

    @property
    def restarts(self) -> int:
        """How often a worker had to be started again."""
        return sum(each.restarts for each in self._queues)

    @property
    def under_way(self) -> int:
        """Calls that workers have."""
        return sum(each.under_way for each in self._queues)

    def reset(self, session: int, prompt: Prompt, answered: Answered) -> None:
        """Begins a session."""
        self._open[session] = Past()
        self._ask("reset", session, prompt.model_dump(), answered)

    def step(
        self, session: int, answer: str, answered: Answered, finish: Finish = "stop", thinking: bool = False,
        marked: str = "", before: str = "",
    ) -> None:  # fmt: skip
        """Tells it what the policy said, and how that ended; ``thinking``: the template had begun a thought;
        ``marked``: the same with special tokens, and ``before`` what stands before it, where these are read."""
        told = {"answer": answer, "finish_reason": finish, "thinking": thinking, "marked": marked, "before": before}
        self._ask("step", session, told, answered)

    def finish(self, session: int, answered: Answered) -> None:
        """Asks for its reward, since it ends before it says so; then `end` it."""
        self._ask("finish", session, None, answered)

    def end(self, session: int) -> None:
        """Forgets it."""
        if past := self._open.pop(session, None):
            past.over = True
        closed = self._call(session, "close", None, lambda found, error: None)
        self._closing.add(closed)
        closed.add_done_callback(self._closing.discard)

    def close(self) -> None:
        """Ends all sessions, and all workers."""
        for session in list(self._open):
            self.end(session)
        wait(list(self._closing), CLOSE_S)
        for each in self._queues:
            each.close()

    def _ask(self, op: str, session: int, given: Any, answered: Answered) -> None:
        past = self._open.setdefault(session, Past())
        past.told.append((op, given))

        def heard(found: dict[str, Any] | None, error: str) -> None:
            if error == LOST:
                self._replays[session % len(self._queues)].begin(session, past, settled)
            else:
                settled(found, error)

        def settled(found: dict[str, Any] | None, error: str) -> None:
            if error == LOST:
                self._open.pop(session, None)
            elif found is not None:
                past.found.append(found)
            answered(found, error)

        self._call(session, op, given, heard)

    def _call_first(self, session: int, op: str, given: Any, answered: Answered) -> Future[Any]:
        return self._call(session, op, given, answered, first=True)

    def _call(self, session: int, op: str, given: Any, answered: Answered, first: bool = False) -> Future[Any]:
        call = Call({"op": op, "session": session, "given": given})

        def done(_future: Any) -> None:
            error = call.future.exception()
            if error is not None:
                answered(None, str(error))
                return
            found = call.future.result()
            if LOST in found:
                answered(None, LOST)
            elif found.get("pictures") and not self._pictures:
                answered(None, SHOWS.format(key=self._key))
            else:
                answered(found, "")

        call.future.add_done_callback(done)
        self._queues[session % len(self._queues)].submit(call, first)
        return call.future
