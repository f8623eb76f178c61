"""What the broker holds of finished groups: their experience and their columns, in Redis and, until a step has taken
them, in memory too, so that nothing is read back that is here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.protocols.columns import ColumnTable
from penstock.protocols.experience import ExperienceError, Purpose, as_bytes
from penstock.protocols.messages import TakenGroup
from penstock.protocols.packed_groups import source_in
from penstock.protocols.wire import WireError
from penstock.services.broker.store import Store, StoreError

EXPERIENCE = "experience"
KEPT_BYTES = 512 << 20
"""Of groups in memory. Beyond that the oldest are read from Redis when they are needed."""

Key = tuple[Purpose, int]
Parts = dict[str, bytes]


class PayloadLostError(StoreError):
    """The store answers, and has not what it was given."""


class Payloads:
    """Parts of groups by name: the experience, then a part for each column. Evaluation groups are in memory alone."""

    def __init__(self, store: Store, table: ColumnTable) -> None:
        self._store = store
        self._dtypes = {column.name: np.dtype(column.dtype) for column in table.columns}
        self._dtypes |= {total.name: np.dtype(np.float32) for total in table.sums}
        self._of_sources = {column.name: column for column in table.columns if column.sources}
        self._held: dict[Key, Parts] = {}
        self._bytes = 0
        self._queued: set[Key] = set()
        """Groups with parts that this turn has queued, which a read of the store would not see yet."""
        self._parting: set[Key] = set()
        """Of these, the ones that are to be forgotten once it would."""

    def begin(self, key: Key, experience: bytes) -> None:
        """A group is finished."""
        self._hold(key, {EXPERIENCE: experience})
        if key[0] == "train":
            self._queued.add(key)
            self._store.put_payload(key[1], EXPERIENCE, experience)

    def add(self, key: Key, column: str, values: np.ndarray) -> None:
        """A column of it has arrived."""
        data = values.tobytes()
        self._parts(key)[column] = data  # read first, where it is not here: what is queued cannot be read back
        self._bytes += len(data)
        if key[0] == "train":
            self._queued.add(key)
            self._store.put_payload(key[1], column, data)

    def experience(self, key: Key) -> np.ndarray:
        """uint8 ``[bytes]``, as messages carry it."""
        return as_bytes(self._parts(key)[EXPERIENCE])

    def source(self, key: Key) -> str:
        """Of the prompt that the group answers; empty where it cannot be read."""
        return _source(self._parts(key)) or ""

    def has(self, key: Key, column: str) -> bool:
        """It is there."""
        return column in self._parts(key)

    def lacking(self, numbers: list[int], column: str) -> list[int]:
        """Those of the training groups ``numbers`` of a broker before this one that are without a column. They may have
        gigabytes together, of which nothing is read."""
        return [
            number
            for number, found in zip(numbers, self._store.has_payloads(numbers, column), strict=True)
            if not found
        ]

    def columns(self, key: Key, names: Sequence[str]) -> dict[str, np.ndarray]:
        """These columns of a group, which must be there."""
        parts = self._parts(key) if names else {}
        return {name: np.frombuffer(parts[name], self._dtypes[name]) for name in names}

    def taken(self, numbers: Sequence[int], columns: Sequence[str], partial: bool = False) -> list[TakenGroup]:
        """The groups of a step with all their columns, or, ``partial``, with those that they have. Raises `StoreError`
        where the store has lost one. Columns that not every source is asked for are there where they are."""
        away = [number for number in numbers if ("train", number) not in self._held]
        read = dict(zip(away, self._store.payloads(away), strict=True)) if away else {}
        groups = []
        for number in numbers:
            parts = read[number] if number in read else self._held["train", number]
            if EXPERIENCE not in parts:
                raise PayloadLostError(
                    f"the store has lost group {number}: its step cannot be redone; go back to "
                    "a checkpoint that there is: penstock rollback RUN VERSION"
                )
            if not partial and (missing := self._lacking(parts, columns)):
                raise StoreError(
                    f"group {number} was taken by a step when this run had no column {', '.join(missing)}: go on with "
                    "the config that it had (reward.functions, scorers) until a checkpoint covers the step"
                )
            values = {name: np.frombuffer(parts[name], self._dtypes[name]) for name in columns if name in parts}
            groups.append(TakenGroup(number=number, experience=as_bytes(parts[EXPERIENCE]), columns=values))
        return groups

    def _lacking(self, parts: Parts, columns: Sequence[str]) -> list[str]:
        """Of ``columns`` those that a group of its source has, and this one has not."""
        missing = [name for name in columns if name not in parts]
        if self._of_sources.keys().isdisjoint(missing):
            return missing
        source = _source(parts)
        of_source = {name for name in self._of_sources if source is not None and self._of_sources[name].asked(source)}
        return [name for name in missing if name not in self._of_sources or name in of_source]

    def settled(self) -> None:
        """The turn is durable, and visible to reads."""
        self._queued.clear()
        for key in self._parting:
            self.forget(key)
        self._parting.clear()

    def forget(self, key: Key) -> None:
        """It is not needed in memory any more, once it can be read elsewhere."""
        if key in self._queued:
            self._parting.add(key)
        else:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        parts = self._held.pop(key, None)
        if parts:
            self._bytes -= sum(map(len, parts.values()))

    def delete(self, number: int) -> None:
        """A training group is not needed any more at all."""
        self._drop(("train", number))
        self._store.delete_payloads(number)

    def _hold(self, key: Key, parts: Parts) -> None:
        self._drop(key)
        self._held[key] = parts
        self._bytes += sum(map(len, parts.values()))
        while self._bytes > KEPT_BYTES and len(self._held) > 1:
            spare = (k for k in self._held if k[0] == "train" and k != key and k not in self._queued)
            oldest = next(spare, None)
            if oldest is None:
                break
            self._drop(oldest)

    def _parts(self, key: Key) -> Parts:
        if key not in self._held:  # of a broker before this one, or beyond what is kept
            assert key[0] == "train" and key not in self._queued
            self._hold(key, self._store.payloads([key[1]])[0])
        return self._held[key]


def _source(parts: Parts) -> str | None:
    """None where it cannot be read, which whoever reads the group finds out."""
    try:
        return source_in(as_bytes(parts.get(EXPERIENCE, b"")))
    except (ExperienceError, WireError):
        return None
