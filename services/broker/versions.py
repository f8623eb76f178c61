"""The published versions: what the newest one is, and what it must hash to."""

from __future__ import annotations

from penstock.services.broker.rules.journal import Journal

KEPT = 100
"""A rollout that serves an older one than this is not leased anyway."""


class Versions:
    """Number and digest of the versions published last."""

    TABLE = "versions"

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.digests = {int(number): row["digest"] for number, row in journal.rows(self.TABLE).items()}

    @property
    def latest(self) -> int:
        """The newest published version; -1 before the first."""
        return max(self.digests, default=-1)

    def serves(self, version: int, digest: str) -> bool:
        """``digest`` is that of ``version`` on the present timeline."""
        return self.digests.get(version) == digest

    def abandon(self, after: int) -> None:
        """The versions above ``after`` are being made again, and may come out different: no rollout that serves one of
        them is leased before it has loaded its successor."""
        for version in [v for v in self.digests if v > after]:
            del self.digests[version]
            self._journal.delete(self.TABLE, version)

    def publish(self, version: int, digest: str) -> None:
        """The trainer has committed ``version`` to be served."""
        if self.digests.get(version) == digest:
            return
        self.digests[version] = digest
        self._journal.put(self.TABLE, version, {"digest": digest})
        for old in [v for v in self.digests if v <= version - KEPT]:
            del self.digests[old]
            self._journal.delete(self.TABLE, old)
