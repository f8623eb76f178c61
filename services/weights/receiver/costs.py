"""What it costs to load a version, and what the sender is told of it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.protocols.messages import CommitVersion, Loaded, Propose


@dataclass
class Costs:
    """Of one proposal: seconds, bytes, and buckets that were asked for again."""

    receive_s: float = 0.0
    verify_s: float = 0.0
    prepare_s: float = 0.0
    bytes_received: int = 0
    again: int = 0
    hash_s: float = 0.0

    def loaded(self, proposal: Propose, commit: CommitVersion, canary: float) -> Loaded:
        """What is said once it serves, but for the pause; ``canary``: the difference of its log-probabilities."""
        return Loaded(
            epoch=proposal.epoch,
            version=proposal.version,
            digest=commit.digests.whole,
            transport=proposal.route.type,
            bytes_received=self.bytes_received,
            buckets_again=self.again,
            receive_s=self.receive_s,
            verify_s=self.verify_s + self.hash_s,
            prepare_s=self.prepare_s,
            canary=canary,
        )
