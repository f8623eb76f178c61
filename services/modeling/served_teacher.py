"""A teacher behind a server of vLLM's: the same as `teacher.Teacher`, from a model that others have loaded."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.protocols.columns import top_values
from penstock.protocols.experience import ExperienceError, Group, Trajectory
from penstock.services.runtime import health
from penstock.services.runtime.asking import AskingError, ask
from penstock.services.runtime.custom_scorer import SERVED_S
from penstock.services.runtime.errors import SetupError

BEAT_S = 1.0
REST = 1e-7
"""What is left for all other tokens together, at least: less is not told from what 32 bits round."""


class ServedTeacher:
    """scorers: {teacher: {scorer: served_teacher, columns: {teacher: token},
                           options: {url: "http://teacher:8000/v1", model: Qwen/Qwen3-235B-A22B}}}

    ``url``: the base of an OpenAI-compatible server that says ``prompt_logprobs``, as vLLM's does; ``model``: what it
    calls its model, which shares the policy's vocabulary. It says log-probabilities at temperature 1. ``column`` and
    ``top_k`` as of `teacher.Teacher`; the server's ``--max-logprobs`` must allow that many. ``concurrency``: answers
    that it is asked about at once. ``seconds``: for one of them, in which a busy or failing server is asked up to
    ``attempts`` times, as of `judge`. The variable ``key_env`` holds a key, where one is needed.
    """

    def __init__(
        self, url: str, model: str, column: str = "teacher", top_k: int | None = None, concurrency: int = 64,
        seconds: float = SERVED_S, attempts: int = 40, key_env: str = "OPENAI_API_KEY",
    ) -> None:  # fmt: skip
        if min(concurrency, attempts, seconds) <= 0:
            given = f"concurrency={concurrency}, seconds={seconds:g}, attempts={attempts}"
            raise SetupError(f"options: {given}; set all above 0")
        self._base, self._model = url.rstrip("/"), model
        self._column, self._k, self._concurrency = column, top_k or 0, concurrency
        self._seconds, self._attempts = seconds, attempts
        secret = os.environ.get(key_env, "") if key_env else ""
        self._headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        self._runner = asyncio.Runner()
        """One loop for all calls: connections belong to it."""

    def at_once(self, groups: Sequence[Group]) -> int:
        """See `custom_scorer.SEVERAL`."""
        answers = itertools.accumulate(len(group.trajectories) for group in groups)
        return max(1, sum(count <= self._concurrency for count in answers))

    def score_group(self, group: Group, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Log-probabilities, natural logarithm: float32 ``[tokens of all trajectories]``, 0 where nothing was
        sampled. With `top_k` also `columns.top_columns`, flat. Raises `AskingError`, and `ExperienceError` where it
        shows pictures."""
        (found,) = self.score_groups([group], [columns])
        if isinstance(found, Exception):
            raise found
        return found

    def score_groups(
        self, groups: Sequence[Group], columns: Sequence[Mapping[str, np.ndarray]]
    ) -> list[dict[str, np.ndarray] | Exception]:
        """The same, of each of ``groups``, or why it has none."""
        return self._runner.run(self._ask_all(groups))

    def reads(self, text: str) -> list[int] | None:
        """``text`` as its tokens, without marks around it; None where the server does not say."""
        url, body = f"{self._base.removesuffix('/v1')}/tokenize", {"prompt": text, "add_special_tokens": False}
        try:
            answer = self._runner.run(self._within(ask(url, body | {"model": self._model}, 1, self._headers)))
            return [int(token) for token in answer.json()["tokens"]]
        except (AskingError, LookupError, TypeError, ValueError):
            return None

    def close(self) -> None:
        """Ends the loop."""
        self._runner.close()

    def _joined(self, parts: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
        logs, ids, tops = (np.concatenate(each) for each in zip(*parts, strict=True))
        return {self._column: logs} | (top_values(self._column, self._k, ids, tops) if self._k else {})

    async def _ask_all(self, groups: Sequence[Group]) -> list[dict[str, np.ndarray] | Exception]:
        room = asyncio.Semaphore(self._concurrency)
        alive = asyncio.create_task(_beat())  # each answer has its own deadline
        try:
            return await asyncio.gather(*(self._ask_of(group, room) for group in groups))
        finally:
            alive.cancel()

    async def _ask_of(self, group: Group, room: asyncio.Semaphore) -> dict[str, np.ndarray] | Exception:
        try:
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(self._ask(trajectory, room)) for trajectory in group.trajectories]
        except ExceptionGroup as errors:
            return next(iter(errors.exceptions))
        return self._joined([task.result() for task in asked])

    async def _within(self, answer: Awaitable[Any]) -> Any:
        """Raises `AskingError` where it is late."""
        try:
            async with asyncio.timeout(self._seconds):
                return await answer
        except TimeoutError:
            raise AskingError(f"{self._base} has not answered within {self._seconds:g} s (options.seconds)") from None

    async def _ask(self, trajectory: Trajectory, room: asyncio.Semaphore) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each token its log-probability, float32; and of the sampled ones ids and log-probabilities of the k
        likeliest ``[sampled, k]`` and, with that of all others, ``[sampled, k + 1]``."""
        if trajectory.pictures:
            raise ExperienceError("it shows pictures, and a served_teacher is asked about tokens alone")
        tokens = trajectory.tokens.tolist()
        body = {"model": self._model, "prompt": tokens, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": self._k}
        url = f"{self._base}/completions"
        async with room:
            answer = await self._within(ask(url, body, self._attempts, self._headers))
        try:
            stated = answer.json()["choices"][0]["prompt_logprobs"]
            return self._read(trajectory, tokens, stated)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise AskingError(
                f"{url} says no prompt_logprobs of every token ({type(error).__name__}: {error}); it must be a "
                f"server of vLLM's: {answer.text[:120]!r}"
            ) from None

    def _read(
        self, trajectory: Trajectory, tokens: Sequence[int], stated: Sequence[Any]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if len(stated) != len(tokens):
            raise ValueError(f"{len(stated)} for {len(tokens)} tokens")
        places = np.flatnonzero(trajectory.loss_mask == 1).tolist()
        logs = np.zeros(len(tokens), np.float32)
        ids, tops = np.zeros((len(places), self._k), np.int32), np.zeros((len(places), self._k + 1), np.float64)
        for row, place in enumerate(places):
            if place == 0:
                continue  # predicted by nothing
            found = stated[place]
            logs[place] = found[str(tokens[place])]["logprob"]
            if self._k:
                best = sorted((each["rank"], int(token), each["logprob"]) for token, each in found.items())[: self._k]
                ids[row], tops[row, :-1] = ([each[part] for each in best] for part in (1, 2))
        if not (logs <= 0).all():  # servers may be told to say logits in their place
            raise ValueError(f"{logs.max():g} is no log-probability")
        tops[:, -1] = np.log(np.maximum(1 - np.exp(tops[:, :-1]).sum(-1), REST))
        return logs, ids, tops


async def _beat() -> None:
    while True:
        health.beat()
        await asyncio.sleep(BEAT_S)
