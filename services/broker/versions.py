"""The published versions: what the newest one is, and what it must hash to."""

from __future__ import annotations

from services.broker.leases import Journal


class Versions:
    """Number and digest of every version ever published."""

    TABLE = "versions"

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.digests = {int(number): row["digest"] for number, row in journal.rows(self.TABLE).items()}

    @property
    def latest(self) -> int:
        """The newest published version; -1 before the first."""
        return max(self.digests, default=-1)

    def publish(self, version: int, digest: str) -> None:
        """The trainer offers ``version``."""
        self.digests[version] = digest
        self._journal.put(self.TABLE, version, {"digest": digest})
