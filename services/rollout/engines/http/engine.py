"""An inference server of any make, reached over HTTP, which reads versions from a folder that it shares with us.

A server's answer does not say which weights sampled which token. So no trajectory ever has two versions here: before a
version is loaded, what is in flight is waited for, and what comes meanwhile waits for the version.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import tempfile
import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import structlog
import torch

from penstock.protocols.experience import Finish
from penstock.services.modeling.experts import as_in_files
from penstock.services.modeling.files_beside import read_beside, write_beside
from penstock.services.modeling.lengths import positions_of
from penstock.services.modeling.load import folder_of, has_own_code, load_config
from penstock.services.modeling.weight_files import save_in_parts
from penstock.services.rollout.engines.asynchronous import AsyncEngine, load_within_s
from penstock.services.rollout.engines.base import (
    Completion,
    EngineError,
    Request,
    RequestError,
    refuse_partial,
)
from penstock.services.rollout.engines.http.claim import claim
from penstock.services.rollout.http_options import HttpOptions
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.install import install
from penstock.services.weights.receiver.loader import MappedVersion

log = structlog.get_logger()

_OWNER = f"penstock-{socket.gethostname()}-"
PAUSE_S = 10.0
"""The longest pause before a request is sent again."""
OUTAGES = 3
"""That one answer lives through."""
WATCH_S, IDLE_S = 2.0, 5.0
"""A server of which nothing is wanted is looked at so often; and after so long without a word of it nobody would have
seen that it went away and came back."""
ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
"""Nothing comes by a line while an answer is sampled: so a host that is gone, or was started again, is noticed."""
DRAIN_POLL_S, LISTEN_S = 0.01, 1.0
KEPT = 2
"""Versions that stay in the folder: the one that serves, and the next one."""
BESIDE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


class _Busy(ValueError):
    """The server cannot answer now."""


class _Away(_Busy):
    """Something in front of it says that it is not there."""


@dataclass(frozen=True)
class Answer:
    """What a server says of one continuation."""

    tokens: list[int]
    logprobs: list[float]
    stopped: bool


@dataclass(frozen=True)
class Version:
    """A version that lies in a folder, in transformers' layout."""

    folder: Path
    nbytes: int = 0


class HttpEngine(AsyncEngine):
    """What all servers have in common. What is made of it knows one kind's requests and answers."""

    remote = True
    device = torch.device("cpu")

    def __init__(self, options: HttpOptions, model_path: str, dtype: str, stop_ids: set[int]) -> None:
        try:
            import httpx
        except ImportError as error:
            raise SetupError(f"rollout.engine: engines over HTTP need httpx; run: {install('http')}") from error
        config = load_config(model_path)
        self._family: str = config.model_type
        vocabulary = config.get_text_config().vocab_size
        length = min(options.max_length, positions_of(config) or options.max_length)
        super().__init__(type(self).__name__, vocabulary, length, options.max_sequences)
        self.options, self.stop_ids = options, sorted(stop_ids)
        self._model_path, self._generated = Path(model_path), 0
        self._code = read_beside(folder_of(model_path), code=True) if has_own_code(config) else {}
        self._written: list[Path] = []
        self._flying, self._door = 0, asyncio.Event()
        """Requests that the server has; whether more may go there."""
        self._quiet_since = time.monotonic()
        self._draining_since: float | None = None
        self._serving: Version | None = None
        self._loads, self._renewing = 0, asyncio.Lock()
        self._doubted = False
        """The server may have been started again: nothing is asked of it before it has read the version once more."""
        self._folder = Path(options.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.glob(f"{_OWNER}*"):  # by rollouts of this host that were killed
            match = re.fullmatch(re.escape(_OWNER) + r"(\d+)-\w{8}", left.name)
            # In a container that was started again this process has the number of the one before it.
            if match and (int(match[1]) == os.getpid() or not psutil.pid_exists(int(match[1]))):
                shutil.rmtree(left, ignore_errors=True)
        self.url, self._lock = claim(options.url, self._folder)
        key = os.environ.get(options.key_env) if options.key_env else None
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        most = options.max_sequences + 1  # one for scores: what waits for a version takes all others when it is there
        lines = httpx.AsyncHTTPTransport(
            limits=httpx.Limits(max_connections=most, max_keepalive_connections=most),
            trust_env=False,
            socket_options=[
                (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
                *((socket.IPPROTO_TCP, getattr(socket, k), v) for k, v in ALIVE.items() if hasattr(socket, k)),
            ],
        )
        self._client = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=options.deadline_s, transport=lines, trust_env=False
        )
        self._patient = httpx.Timeout(options.deadline_s, read=None)
        """For what takes as long as it is; whoever waits for it has a deadline."""
        self._gone: tuple[type[Exception], ...] = (httpx.TransportError, _Away)
        """After these it may be another one that answers, with the weights that it was started with."""
        self._passing: tuple[type[Exception], ...] = (*self._gone, _Busy)
        within_s = options.start_s + options.deadline_s
        try:
            self.call(self._reach(), within_s, f"be reached at {self.url} (options.url, options.start_s)")
        except BaseException:
            self._lock.close()
            raise
        self._watching = self.spawn(self._watch())

    async def _reach(self) -> None:
        """`hello`, as soon as it answers."""
        begun, said = time.monotonic(), False
        while True:
            try:
                return await self.hello()
            except self._passing as error:
                if time.monotonic() - begun > self.options.start_s:
                    raise
                if not said:
                    log.warning("waiting for the server", url=self.url, error=f"{type(error).__name__}: {error}")
                said = True
                await asyncio.sleep(1.0)

    async def _watch(self) -> None:
        """Nothing starts a model within `WATCH_S`: one that answers whenever it is looked at was never away."""
        while True:
            await asyncio.sleep(WATCH_S)
            if self._flying or self._serving is None or time.monotonic() - self._quiet_since < WATCH_S:
                continue
            try:
                await self.hello()
            except Exception:  # what is asked of it next says what is wrong
                self._doubted = True
            # Nor does this one know of what happened while it did not run, or waited for long.
            self._doubted = self._doubted or time.monotonic() - self._quiet_since > IDLE_S
            self._quiet_since = time.monotonic()

    @abstractmethod
    async def hello(self) -> None:
        """Raises where the server is not what it should be."""

    @abstractmethod
    async def ask(self, request: Request, seed: int) -> Answer:
        """One continuation of ``request``."""

    @abstractmethod
    async def load(self, version: Version, number: int) -> None:
        """Makes the server read ``version``, and forget what it has cached."""

    @abstractmethod
    async def score_tokens(self, tokens: list[int]) -> list[float]:
        """Log-probabilities of all but the first, at temperature 1."""

    @property
    def capacity(self) -> int:
        """See `base.Engine.capacity`."""
        return self.options.max_sequences

    def prepare(self, weights: Mapping[str, torch.Tensor], memory: MappedVersion | None = None) -> Version:
        """See `base.Engine.prepare`: writes the version, in a folder of its own."""
        refuse_partial(weights.keys(), str(self._model_path))
        for old in self._written[: 1 - KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{_OWNER}{os.getpid()}-", dir=self._folder))
        folder.chmod(0o755)  # the server may be another user
        try:
            for name in BESIDE:
                if (self._model_path / name).is_file():
                    shutil.copyfile(self._model_path / name, folder / name)
            write_beside(self._code, folder)
            save_in_parts(folder, as_in_files(self._family, weights))
        except BaseException:  # a disk that is full, say: the one that serves must stay
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._written = [*self._written[1 - KEPT :], folder]
        return Version(folder, sum(weight.nbytes for weight in weights.values()))

    def submit(self, request: Request) -> None:
        """See `base.Engine.submit`."""
        if request.sampling.candidates:
            raise RequestError("rollout.sampling.candidates: servers over HTTP do not say what a sampler kept")
        if request.sampling.routing_replay:
            raise RequestError("rollout.sampling.routing_replay: servers over HTTP do not say which experts they took")
        super().submit(request)

    def swap(self, prepared: Version, version: int) -> None:
        """See `base.Engine.swap`. Waits until nothing is in flight; what was not sent yet waits for the version."""
        self.call(self._drain(), self.options.drain_s, "answer what is in flight (options.drain_s)")
        within_s = load_within_s(prepared.nbytes, self.options.deadline_s)
        self.call(self.load(prepared, version), within_s, f"load version {version} (options.deadline_s)")
        self._serving, self._quiet_since, self._draining_since = prepared, time.monotonic(), None
        self._doubted = False
        self.serve(version)
        self._loop.call_soon_threadsafe(self._door.set)

    def drained(self) -> bool:
        """See `base.DrainingEngine.drained`."""
        if self._draining_since is None:
            self._draining_since = time.monotonic()
            self._loop.call_soon_threadsafe(self._door.clear)
        waited_s = time.monotonic() - self._draining_since
        if self._flying and waited_s > self.options.drain_s:
            raise EngineError(f"{type(self).__name__}: what is in flight {self._too_long()}")
        return not self._flying

    def _too_long(self) -> str:
        remedy = "raise rollout.engine.options.drain_s, or lower rollout.sampling.max_new_tokens"
        return f"took longer than options.drain_s={self.options.drain_s:g}; {remedy}"

    async def _drain(self) -> None:
        self._door.clear()
        while self._flying:
            await asyncio.sleep(DRAIN_POLL_S)

    def score(self, prepared: Version, tokens: np.ndarray) -> np.ndarray:
        """See `base.Engine.score`."""
        found = self.call(
            self.score_tokens(tokens.tolist()), self.options.deadline_s, "score a sequence (options.deadline_s)"
        )
        return np.array(found, np.float32)

    async def generate(self, request: Request, sample: int, seed: int) -> Completion:
        """See `AsyncEngine.generate`. Dropping the connection makes servers abort the request."""
        await self._door.wait()
        if not self._flying and time.monotonic() - self._quiet_since > IDLE_S:
            self._doubted = True
        version = self.version
        self._flying += 1
        try:
            answer = await self._asked(request, seed)
        finally:
            self._flying -= 1
            self._quiet_since = time.monotonic()
        tokens, logprobs = np.array(answer.tokens, np.int32), np.array(answer.logprobs, np.float32)
        if len(tokens) != len(logprobs):
            raise ValueError(f"{len(tokens)} token ids and {len(logprobs)} log-probabilities")
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self._vocabulary:
            raise ValueError(f"token ids from {tokens.min()} to {tokens.max()}, of a vocabulary of {self._vocabulary}")
        self._generated += len(tokens)
        finish: Finish = "stop" if answer.stopped else "length"
        return Completion(request.number, sample, tokens, logprobs, np.full(len(tokens), version, np.int32), finish)

    async def _asked(self, request: Request, seed: int) -> Answer:
        """`_answer`, again where the server was busy or the line broke."""
        failing_since, attempt, outages = 0.0, 0, 0
        while True:
            loads, asked_at = -1, time.monotonic()
            try:
                await self._believe()
                loads = self._loads
                return await self._answer(request, seed)
            except self._passing as error:
                now = time.monotonic()
                if not outages or now - asked_at > PAUSE_S:  # it has been at work for a while
                    failing_since, attempt, outages = now, 0, outages + 1
                if now - failing_since > self.options.start_s or outages > OUTAGES:
                    raise
                log.warning("asking again", group=request.number, error=f"{type(error).__name__}: {error}")
                if loads == self._loads and isinstance(error, self._gone):  # or it has been loaded since then
                    self._doubted = True
                await asyncio.sleep(min(2**attempt, PAUSE_S))
                attempt += 1

    async def _answer(self, request: Request, seed: int) -> Answer:
        """`ask`. Raises `EngineError` where that takes too long of a server that is there: it is slow, and was not
        started again."""
        asked, left_s = asyncio.ensure_future(self.ask(request, seed)), self.options.drain_s
        try:
            while left_s > 0:  # of the time in which this process ran
                listened_s = min(LISTEN_S, left_s)
                if (await asyncio.wait([asked], timeout=listened_s))[0]:
                    return asked.result()
                left_s -= listened_s
        finally:
            asked.cancel()
        await self.hello()
        raise EngineError(f"an answer {self._too_long()}")

    async def _believe(self) -> None:
        """Until the server has our version for certain. What is in flight may go on meanwhile: to a server that never
        went away it is the same one."""
        if not self._doubted:
            return
        async with self._renewing:
            if self._doubted and self._serving:
                log.warning("the server may have been started again: it reads the version once more", at=self.version)
                within_s = load_within_s(self._serving.nbytes, self.options.deadline_s)
                try:
                    async with asyncio.timeout(within_s):
                        await self.load(self._serving, self.version)
                except TimeoutError:
                    late = f"version {self.version} was not loaded within {within_s:g} s"
                    raise _Away(f"{late} (options.deadline_s)") from None
                self._loads, self._doubted = self._loads + 1, False

    async def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON that the server answers with. Raises with what it said where that is an error: `RequestError` where
        it does not like the request."""
        reply = _sound(path, await self._client.post(path, json=body or {}, timeout=self._patient))
        return reply.json() if reply.content else None

    async def get(self, path: str) -> Any:
        """As `post`."""
        return _sound(path, await self._client.get(path))

    def gauges(self) -> dict[str, float]:
        """See `base.Engine.gauges`."""
        self.check()
        return {"running": self.pending() - self.early, "queued": self.early, "generated_tokens": self._generated}

    def close(self) -> None:
        """See `base.Engine.close`. The server is not ours, and goes on."""
        deadline = time.monotonic() + 5
        self._watching.cancel()
        self._lock.close()
        try:
            self.call(self._client.aclose(), max(0.1, deadline - time.monotonic()), "close")
        except EngineError:
            pass
        self.end()
        for folder in self._written:
            shutil.rmtree(folder, ignore_errors=True)


def _sound(path: str, reply: Any) -> Any:
    if not reply.is_error:
        return reply
    said = f"{path} answered {reply.status_code}: {reply.text[:300]}"
    if reply.status_code in (400, 413, 422):
        raise RequestError(said)
    if reply.status_code in (502, 503, 504):
        raise _Away(said)
    raise _Busy(said) if reply.status_code == 429 else ValueError(said)


def ended_by_stop(reason: str) -> bool:
    """Whether a continuation came to its end, or to its limit. Raises where it was cut off by something else."""
    if reason not in ("stop", "length"):
        raise ValueError(f"the server ended a continuation by {reason!r}")
    return reason == "stop"
