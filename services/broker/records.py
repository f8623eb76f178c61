"""What gateways have had kept of the sessions of unfinished groups: in Redis, and here, and gone with the group."""

from __future__ import annotations

from penstock.protocols.experience import Purpose
from penstock.services.broker.store import Store

TABLE = "records"
Key = tuple[Purpose, int]


class Records:
    """Bytes by name, for each group. Those of evaluation groups are in memory alone."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._held: dict[Key, dict[str, bytes]] = {}

    def of(self, key: Key) -> dict[str, bytes]:
        """All that is kept of a group."""
        if key not in self._held:  # of a broker before this one, or nothing
            found = self._store.payloads([key[1]], TABLE)[0] if key[0] == "train" else {}
            self._held[key] = found
        return self._held[key]

    def keep(self, key: Key, name: str, data: bytes) -> None:
        """Durable with the turn."""
        self.of(key)[name] = data
        if key[0] == "train":
            self._store.put_payload(key[1], name, data, TABLE)

    def discard(self, key: Key, name: str) -> None:
        """It is not wanted any more, if it is there."""
        if self.of(key).pop(name, None) is not None and key[0] == "train":
            self._store.delete(f"{TABLE}:{key[1]}", name)

    def begin(self, key: Key) -> None:
        """A group of which nothing can be kept yet."""
        self._held[key] = {}

    def end(self, key: Key) -> None:
        """The group is finished, or will never be."""
        held = self._held.pop(key, None)
        if key[0] == "train" and held != {}:
            self._store.delete_payloads(key[1], TABLE)
