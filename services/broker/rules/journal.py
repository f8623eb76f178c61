"""What the rules write down."""

from __future__ import annotations

from typing import Any, Protocol


class Journal(Protocol):
    """What `store.Store` offers to the rules: rows that become durable with the turn."""

    def put(self, table: str, key: str | int, row: dict[str, Any]) -> None:
        """Writes one row."""

    def delete(self, table: str, key: str | int) -> None:
        """Removes one row."""

    def rows(self, table: str) -> dict[str, dict[str, Any]]:
        """All committed rows of a table."""


class Volatile:
    """A journal for what need not survive the broker, such as an evaluation: it is begun anew."""

    def put(self, table: str, key: str | int, row: dict[str, Any]) -> None:
        """Forgets it."""

    def delete(self, table: str, key: str | int) -> None:
        """Nothing to remove."""

    def rows(self, table: str) -> dict[str, dict[str, Any]]:
        """None."""
        return {}
