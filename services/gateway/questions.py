"""What an agent has asked in a session, and who waits for the answers: what is asked again has one answer."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.services.gateway.errors import AgentError
from penstock.services.gateway.session import Turn

LATE_S = 1.0
"""Before who was told that his turn is late asks again."""
AGAIN_S = 60.0
"""Who was refused and asks again, as clients do by themselves, has done so by then."""


class EndedError(Exception):
    """There will be no answer: the session has ended."""


class Asking(NamedTuple):
    """How a request is known that was made before."""

    again: bool = False
    """It says that it was, and that the answer did not arrive."""
    key: str = ""
    """Its own name, the same whenever it is made."""
    which: int = 0
    """Of several answers to it."""
    together: asyncio.Barrier | None = None
    """Where all of several are waited for: none of them is heard before."""
    streamed: bool = False
    """Who asks is on a line that is kept open: no answer is late."""
    had: list[Question] | None = None
    """Those whose answers it has, where they can be taken back: who asks may be gone before it is told of them."""

    def digest(self, about: str) -> str:
        """Of what it asks, ``about``, and of what else tells it from others."""
        return hashlib.sha256(f"{self.which}\n{self.key}\n{about}".encode()).hexdigest()

    def take_back(self) -> None:
        """Who asks has gone, and was told of none."""
        while self.had:
            self.had.pop().take_back()


ONCE = Asking()
Ask = Callable[[Asking], Coroutine[Any, Any, Turn]]
"""Has the policy answer, as often as it is called; what it is told has been made tokens of once."""


@dataclass(eq=False)
class Question:
    """One answer of the policy, on its way or there."""

    task: asyncio.Task[Turn] | None = None
    turn: Turn | None = None
    waiting: int = 0
    """How many requests wait for it."""
    heard: int = 0
    """How many have had the answer."""

    @property
    def failed(self) -> bool:
        """It has no answer, and never will."""
        task = self.task
        return task is not None and task.done() and (task.cancelled() or task.exception() is not None)

    async def answer(self, within_s: float | None, together: asyncio.Barrier | None = None) -> Turn:
        """For one more who waits, and has it when all are there that are waited for ``together``. Raises what the task
        raises, and `AgentError` where there is no answer in time (None: there is no such time): who asks again waits
        for the same."""
        self.waiting += 1
        try:
            turn = self.turn
            if turn is None:
                assert self.task is not None
                if not (await asyncio.wait({self.task}, timeout=within_s))[0]:
                    late = f"no answer within gateway.turn_s={within_s:g} s; ask again"
                    raise AgentError(504, "turn_late", late, LATE_S)
                turn = self.task.result()
            if together:
                await together.wait()
            self.heard, turn.wanted = self.heard + 1, True
            return turn
        finally:
            self.waiting -= 1

    def take_back(self) -> None:
        """One of those that have had the answer was not there any more to be told."""
        self.heard -= 1
        if self.turn is not None:
            self.turn.wanted = self.heard > 0


@dataclass(eq=False)
class Questions:
    """Of one session, by what was asked."""

    pending: int = 0
    """How many have no answer yet."""
    _refused: dict[str, list[float]] = field(default_factory=dict)
    """When requests have left no question behind that were not asked again since."""
    _asked: dict[str, list[Question]] = field(default_factory=dict)

    def remember(self, turn: Turn) -> None:
        """It was asked, and answered, at a gateway before this one."""
        self._asked.setdefault(turn.asked, []).append(Question(turn=turn, heard=1))

    def again(self, digest: str) -> Question | None:
        """The one that was most probably meant by who asks again: whose answer nobody has had and for which the fewest
        wait; of several, the latest. None where what was asked is to be asked anew: it was refused."""
        several = self._asked.get(digest, [])
        best = min(reversed(several), key=lambda question: (question.heard > 0, question.waiting), default=None)
        lately = [at for at in self._refused.pop(digest, []) if at > time.monotonic() - AGAIN_S]
        anew = bool(lately) and (best is None or best.heard > 0 or best.waiting > 0)
        if left := lately[1:] if anew else lately:
            self._refused[digest] = left
        return None if anew else best

    def refuse(self, digest: str) -> None:
        """A request has left no question behind: if it is asked again, that is no other's answer."""
        self._refused.setdefault(digest, []).append(time.monotonic())

    def ask(self, digest: str, answer: Coroutine[Any, Any, Turn]) -> Question:
        """A new one. An answer that nobody stays to hear is not trained on, unless it is asked for again."""
        question = Question(asyncio.ensure_future(answer))
        assert question.task is not None
        several = self._asked.setdefault(digest, [])
        several.append(question)
        self.pending += 1

        def done(task: asyncio.Task[Turn]) -> None:
            self.pending -= 1
            if question.failed:
                several.remove(question)
            else:
                question.turn = task.result()
                question.turn.wanted = question.heard > 0  # one may have had it before this call

        question.task.add_done_callback(done)
        return question

    async def once(
        self,
        asked: Asking,
        about: str,
        answer: Callable[[str], Coroutine[Any, Any, Turn]],
        check_room: Callable[[], None],
        done: Callable[[asyncio.Task[Turn]], None],
        within_s: float,
    ) -> Turn:
        """What is asked again has one answer; a new one is ``answer``'s, given its digest, if there is room, and
        ``done`` is told of it. Raises what they raise, `AgentError` where it is late, and `EndedError` where the
        session has ended before."""
        digest = asked.digest(about)
        question = self.again(digest) if asked.again or asked.key else None
        try:
            if question is None:
                check_room()
                question = self.ask(digest, answer(digest))
                assert question.task is not None
                question.task.add_done_callback(done)
            turn = await question.answer(None if asked.streamed else within_s, asked.together)
            if asked.had is not None:
                asked.had.append(question)
            return turn
        except asyncio.CancelledError:
            if question and question.task and question.task.cancelled():
                raise EndedError() from None
            raise
        except Exception:
            if question is None or question.failed:
                self.refuse(digest)
            raise

    def cancel(self) -> None:
        """Nobody will hear the answers."""
        for several in self._asked.values():
            for question in several:
                if question.turn is None and question.task is not None:
                    question.task.cancel()
