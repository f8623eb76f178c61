"""Redis as the broker's journal: everything of one turn becomes durable at once, before any of it is acknowledged."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgpack
import redis
import structlog

from services.broker.config import StoreConfig
from services.section import SetupError

log = structlog.get_logger()


class StoreError(SetupError):
    """The store cannot be used; says which and what to do. Never shows a password."""


class Store:
    """Tables of small rows and one table of payloads, under the run's key.

    Writes are queued and leave together at `commit` as one MULTI/EXEC; all are idempotent, so a commit that failed
    half-way is simply sent again. Reads see only what was committed.
    """

    def __init__(self, url: str, run: str, config: StoreConfig) -> None:
        self._prefix = f"penstock:{run}:"
        self._retry_s = config.retry_s
        self._where = _without_secrets(url)
        self._redis = redis.Redis.from_url(url, socket_timeout=10, socket_connect_timeout=5)
        self._queued: list[tuple[Any, ...]] = []
        self._persist(self._redis.ping)

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

    def put_payload(self, number: int, part: str, data: bytes | memoryview) -> None:
        """Writes one part (experience, rewards, reference) of a group."""
        self._queued.append(("HSET", f"{self._prefix}payload:{number}", part, data))

    def payloads(self, numbers: list[int]) -> list[dict[str, bytes]]:
        """The parts of each group, in one round trip."""

        def read() -> list[dict[bytes, bytes]]:
            pipeline = self._redis.pipeline(transaction=False)
            for number in numbers:
                pipeline.hgetall(f"{self._prefix}payload:{number}")
            return pipeline.execute()

        return [{part.decode(): data for part, data in group.items()} for group in self._persist(read)]

    def delete_payloads(self, number: int) -> None:
        """Frees a group."""
        self._queued.append(("DEL", f"{self._prefix}payload:{number}"))

    def commit(self) -> None:
        """Makes everything queued durable. Waits for a store that is away; raises `StoreError` if it stays away."""
        if not self._queued:
            return

        def write() -> None:
            pipeline = self._redis.pipeline(transaction=True)
            for command in self._queued:
                pipeline.execute_command(*command)
            pipeline.execute()

        self._persist(write)
        self._queued.clear()

    def _persist(self, action: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + self._retry_s
        wait = 0.05
        while True:
            try:
                return action()
            except (redis.ConnectionError, redis.TimeoutError) as error:
                if isinstance(error, redis.AuthenticationError):
                    raise StoreError(f"store.url: {self._where} refused the credentials") from None
                if time.monotonic() + wait > deadline:
                    raise StoreError(
                        f"store.url: no Redis answers at {self._where} ({error}); waited {self._retry_s:g} s. "
                        "Start it, correct store.url, or leave store.url out to have a private server"
                    ) from None
                log.warning("waiting for the store", store=self._where, error=str(error))
                time.sleep(wait)
                wait = min(1.0, wait * 2)
            except redis.RedisError as error:
                raise StoreError(f"store at {self._where}: {error}") from None


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    return f"{parts.scheme}://{parts.hostname or ''}" + (f":{parts.port}" if parts.port else "") + parts.path
