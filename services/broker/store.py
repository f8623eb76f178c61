"""Redis as the broker's journal: everything of one turn becomes durable at once, before any of it is acknowledged.

Every commit is one MULTI/EXEC that also writes the commit's number. A Redis that comes back with an older number has
lost the last commits (a torn append-only file); those are kept here for a while and are sent again, in order, so what
was acknowledged stays true as long as this process lives. All writes are idempotent.

A broker takes an epoch as it opens the store, and every commit looks whether it is still the newest: one that was
stopped for a while, and replaced, writes nothing any more.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgpack
import redis
import structlog
from redis.exceptions import MasterDownError, TryAgainError

from penstock.services.broker.config import StoreConfig
from penstock.services.runtime.errors import SetupError

log = structlog.get_logger()

KEPT_BYTES, KEPT_COMMITS = 16 << 20, 2000
"""Commits are kept for a store that lost them, up to this much and this many."""

ANSWER_S, CONNECT_S = 10.0, 5.0
"""For one answer, and for a connection."""

FIRST_S = 45.0
"""A store that has never answered is waited for so long at most: its address may be wrong."""

DEMOTED = (redis.ReadOnlyError, MasterDownError, TryAgainError)
AWAY = (redis.ConnectionError, redis.TimeoutError, redis.OutOfMemoryError, *DEMOTED)
"""What a store says that is not there, or that gives its place to another server just now, or has no room."""
WAITED_FOR = ("NOREPLICAS", "MISCONF")
"""What a refusal begins with that somebody may mend meanwhile: replicas are missing, or its disk takes nothing."""


class StoreError(SetupError):
    """The store cannot be used; says which and what to do. Never shows a password."""


class Store:
    """Tables of small rows and one table of payloads, under the run's name.

    Writes are queued and leave together at `commit`. Reads see only what was committed. ``key`` is the run's own: a
    store that has this run's name but another key belongs to another run and is refused. ``idle`` is called now and
    then while it waits.
    """

    def __init__(
        self, url: str, run: str, config: StoreConfig, key: str | None = None, idle: Callable[[], None] = lambda: None
    ) -> None:
        self._prefix = f"penstock:{run}:"
        self._retry_s = min(FIRST_S, config.retry_s)
        self._own = config.url is None and url.startswith("unix:")
        """The server is the run's own."""
        self._where = _without_secrets(url)
        # No retries of redis-py's own: a store that comes back may have lost writes, so every break must be seen.
        self._redis = redis.Redis.from_url(url, socket_timeout=ANSWER_S, socket_connect_timeout=CONNECT_S, retry=None)
        self._queued: list[tuple[Any, ...]] = []
        self._kept: deque[tuple[int, list[tuple[Any, ...]], int]] = deque()
        self._kept_bytes = 0
        self._idle = idle
        self.waited_s = 0.0
        """How long this process has waited for the store so far."""
        self._line: Any = None
        """The connection that commits go over, which watches whether another broker writes; and what it saw last."""
        self._seen: tuple[int, int] | None = None
        self._persist(self._redis.ping)
        meta = self._prefix + "meta"
        found = self._persist(lambda: self._redis.hget(meta, "key"))
        if found is None:
            self._persist(lambda: self._redis.hset(meta, mapping={"key": key or secrets.token_hex(8), "commits": 0}))
        elif key is not None and found.decode() != key:
            raise StoreError(
                f"store.url: {self._where} holds another run by the name {run!r}; choose another run.name, "
                "or give this run a store of its own"
            )
        self._meta = meta
        self._epoch = int(self._persist(lambda: self._redis.hincrby(meta, "epoch", 1)))
        self._retry_s = config.retry_s
        self._commits = int(self._persist(lambda: self._redis.hget(meta, "commits")) or 0)

    def put(self, table: str, key: str | int, row: dict[str, Any]) -> None:
        """Writes one row."""
        self._queued.append(("HSET", self._prefix + table, str(key), msgpack.packb(row)))

    def delete(self, table: str, key: str | int) -> None:
        """Removes one row."""
        self._queued.append(("HDEL", self._prefix + table, str(key)))

    def rows(self, table: str) -> dict[str, dict[str, Any]]:
        """All rows of a table."""
        found = self._persist(lambda: self._redis.hgetall(self._prefix + table))
        return {key.decode(): msgpack.unpackb(value) for key, value in found.items()}

    def put_payload(self, number: int, part: str, data: bytes | memoryview, table: str = "payload") -> None:
        """Writes one part (experience, rewards, reference) of a group."""
        self._queued.append(("HSET", f"{self._prefix}{table}:{number}", part, data))

    def payloads(self, numbers: list[int], table: str = "payload") -> list[dict[str, bytes]]:
        """The parts of each group, in one round trip. What a store that was restarted has lost is sent again first."""

        def read() -> list[Any]:
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.hget(self._prefix + "meta", "commits")
            for number in numbers:
                pipeline.hgetall(f"{self._prefix}{table}:{number}")
            return pipeline.execute()

        commits, *groups = self._persist(read)
        if int(commits or 0) < self._commits:
            self._seen = None  # that was another store
            self._bring()
            _, *groups = self._persist(read)
        return [{part.decode(): data for part, data in group.items()} for group in groups]

    def has_payloads(self, numbers: list[int], part: str) -> list[bool]:
        """Which of these groups have this part, in one round trip, without reading it: of a store that was opened just
        now."""

        def look() -> list[Any]:
            pipeline = self._redis.pipeline(transaction=False)
            for number in numbers:
                pipeline.hexists(f"{self._prefix}payload:{number}", part)
            return pipeline.execute()

        return [bool(found) for found in self._persist(look)]

    def delete_payloads(self, number: int, table: str = "payload") -> None:
        """Frees a group."""
        self._queued.append(("DEL", f"{self._prefix}{table}:{number}"))

    def commit(self) -> None:
        """Makes everything queued durable. Waits for a store that is away; raises `StoreError` if it stays away."""
        if not self._queued:
            return
        self._commits += 1
        size = sum(len(part) for command in self._queued for part in command if isinstance(part, bytes | str))
        self._kept.append((self._commits, self._queued, size))
        self._kept_bytes += size
        while (self._kept_bytes > KEPT_BYTES or len(self._kept) > KEPT_COMMITS) and len(self._kept) > 1:
            self._kept_bytes -= self._kept.popleft()[2]
        self._queued = []
        self._bring()

    def _bring(self) -> None:
        """Sends the store what it lacks, in order: the last commit, or, where it has lost some, those first."""
        last = self._commits - 1
        while (found := self._persist(self._next)) < self._commits:
            if found < last:
                log.warning("the store has lost commits", store=self._where, found=found, expected=self._commits)
            last = found

    def _next(self) -> int:
        """Sends the first commit that the store lacks, if it lacks one; returns which it has then. Raises `StoreError`
        where another broker has opened it since."""
        look: list[tuple[Any, ...]] = [("WATCH", self._meta), ("HMGET", self._meta, "epoch", "commits")]
        if self._seen is None:
            self._seen = _numbers(self._exchange(look)[-1])
        epoch, commits = self._seen
        if epoch > self._epoch or commits > self._commits:
            raise StoreError(
                f"store at {self._where}: another broker writes to this run; this one was replaced, and ends"
            )
        if commits == self._commits:
            return commits
        commands = self._commands(commits + 1)
        count = ("HSET", self._meta, "commits", commits + 1, "epoch", self._epoch)
        # What was seen last still holds, or nothing of this is done; and it is looked again, all in one round trip.
        *_, done, _, seen = self._exchange([("MULTI",), *commands, count, ("EXEC",), *look])
        if wrong := [each for each in done or () if isinstance(each, redis.RedisError)]:
            raise wrong[0]
        self._seen = _numbers(seen)
        return self._seen[1]

    def _exchange(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        """What is answered to each, over the one connection that watches."""
        line = self._line
        try:
            if line is None:
                line = self._line = self._redis.connection_pool.get_connection()
            line.send_packed_command(line.pack_commands(commands))
            return [line.read_response() for _ in commands]
        except BaseException:  # what it still has to say nobody would understand
            self._hang_up()
            raise

    def _commands(self, number: int) -> list[tuple[Any, ...]]:
        oldest = self._kept[0][0] if self._kept else self._commits + 1
        if number < oldest:
            raise StoreError(
                f"store at {self._where} came back at commit {number - 1} of {self._commits}, and only those from "
                f"{oldest} are kept here: restore the store, or resume the run from its last checkpoint in a new store"
            )
        return self._kept[number - oldest][1]

    def _persist(self, action: Callable[[], Any]) -> Any:
        started = time.monotonic()
        waited, wait = 0.0, 0.05
        while True:
            tried = time.monotonic()
            try:
                result = action()
                self.waited_s += time.monotonic() - started if wait > 0.05 else 0.0
                return result
            except redis.AuthenticationError:
                raise StoreError(f"store.url: {self._where} refused the credentials") from None
            except redis.RedisError as error:
                if not isinstance(error, AWAY) and not str(error).startswith(WAITED_FOR):
                    large = "; a group is larger than it takes: CONFIG SET proto-max-bulk-len 1gb, and go on"
                    raise StoreError(f"store at {self._where}: {error}{large * ('bulk' in str(error))}") from None
                if not isinstance(error, redis.ConnectionError | redis.TimeoutError):
                    self._hang_up()  # whoever has its place is found anew
                # No longer than it can have taken: the time in which this process was stopped is nobody's.
                waited += wait + min(time.monotonic() - tried, ANSWER_S)
                if isinstance(error, redis.BusyLoadingError):  # it is there, and reads what it has written
                    waited = 0.0
                if waited > self._retry_s:
                    raise StoreError(self._away(error)) from None
                log.warning("waiting for the store", store=self._where, error=type(error).__name__)
                self._idle()
                time.sleep(wait)
                wait = min(1.0, wait * 2)

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.disconnect()
            self._redis.connection_pool.release(self._line)
        self._seen = self._line = None
        self._redis.connection_pool.disconnect()

    def _away(self, error: Exception) -> str:
        most = " at most, as one that never answered" if self._retry_s == FIRST_S else ""
        said = f"at {self._where} ({type(error).__name__}); waited {self._retry_s:g} s (store.retry_s{most})"
        if isinstance(error, redis.OutOfMemoryError) or str(error).startswith("MISCONF"):
            return (
                f"store.url: the Redis has no room {said}: {error}. Raise its maxmemory, or free its disk; a run keeps "
                "less in it with a smaller gate.prefetch or trainer.checkpoint.every. What was acknowledged is kept: "
                "go on with --resume"
            )
        if not isinstance(error, redis.ConnectionError | redis.TimeoutError):
            return (
                f"store.url: the Redis takes no writes {said}: {error}. It is a replica, or lacks its own; give the "
                "address of the one that takes them"
            )
        if self._own:
            return (
                f"the run's own Redis does not answer {said}. Is its disk full, or so slow that it stands still? See "
                "logs/redis.stderr in the run's folder; what was acknowledged is kept: go on with --resume"
            )
        return (
            f"store.url: no Redis answers {said}. Start it, correct store.url, or leave store.url out to have a "
            "private server"
        )


def is_loading(url: str) -> bool:
    """The server at ``url`` reads what it had written, and answers nothing yet."""
    try:
        redis.Redis.from_url(url, socket_timeout=2, socket_connect_timeout=2, retry=None).ping()
    except redis.BusyLoadingError:
        return True
    except redis.RedisError:
        pass
    return False


def _numbers(values: list[Any]) -> tuple[int, int]:
    """Epoch and commits, 0 where there are none."""
    epoch, commits = (int(value or 0) for value in values)
    return epoch, commits


def end_server(url: str) -> None:
    """Ends the server at ``url``, which first writes what it has to disk; one that has ended already is fine."""
    log.info("ending the store", store=_without_secrets(url))
    try:
        redis.Redis.from_url(url, socket_timeout=10, socket_connect_timeout=5, retry=None).shutdown()
    except redis.ConnectionError:
        pass
    except redis.RedisError as error:
        log.warning("the store was not ended", store=_without_secrets(url), error=str(error))


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    return f"{parts.scheme}://{parts.hostname or ''}" + (f":{parts.port}" if parts.port else "") + parts.path
