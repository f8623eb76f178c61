"""Rounds of held-out prompts: the same life as that of training groups, but for the gate and the ledger."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.protocols.columns import Column
from penstock.services.broker.rules.journal import Volatile
from penstock.services.broker.rules.leases import Leases
from penstock.services.broker.rules.replay_buffer import Replay


@dataclass(slots=True)
class Round:
    """One evaluation: ``exact`` is the version that every token must come from, None for whatever is served."""

    label: str
    step: int
    exact: int | None
    size: int
    rewards: list[float] = field(default_factory=list)
    """Of the prompts that are done: the mean over their trajectories."""
    versions: list[int] = field(default_factory=list)
    """The oldest and the newest of each group's tokens."""
    unusable: list[str] = field(default_factory=list)
    """Why a prompt has no reward."""

    @property
    def complete(self) -> bool:
        """Every prompt has its reward, or never will."""
        return len(self.rewards) + len(self.unusable) == self.size

    def mean(self) -> float:
        """Mean reward over the prompts that have one; NaN where none has."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else float("nan")


class Evaluation:
    """The round in progress, if any, and the results of those before it. Not durable: a round that a crash cuts short
    is run again."""

    def __init__(self, size: int, columns: Sequence[Column]) -> None:
        self.size = size
        self.round: Round | None = None
        self.results: dict[str, float] = {}
        """Label to mean reward."""
        self.steps: dict[str, int] = {}
        """Label to the step it was made at."""
        # A broker that was started again must not take a late answer to the round before for one of this.
        self.leases = Leases(Volatile(), next_number=time.time_ns() // 1_000_000 % (1 << 40) * 1_000)
        self.replay = Replay(Volatile(), columns)

    def start(self, label: str, step: int, exact: int | None) -> None:
        """Begins a round; only one at a time."""
        assert self.round is None
        self.round = Round(label, step, exact, self.size)
        self.leases.next_draw = 0
        for _ in range(self.size):
            self.leases.new()

    def finish(self, number: int, oldest: int, newest: int, trajectories: int, tokens: int) -> bool:
        """A rollout has answered. False where the answer does not count: repeated, or of a wrong version, which is
        asked for again."""
        lease = self.leases.open.get(number)
        if self.round is None or lease is None:
            return False
        if self.round.exact is not None and (oldest, newest) != (self.round.exact, self.round.exact):
            self.leases.holds.free(number)
            return False
        self.leases.close(number)
        self.replay.add(number, lease.draw, oldest, trajectories, tokens)
        self.round.versions += [oldest, newest]
        return True

    def score(self, number: int, reward: float) -> Round | None:
        """The group has all its columns, and this mean reward; the round, if that completes it."""
        if self.round is None or self.replay.remove(number) is None:
            return None
        self.round.rewards.append(reward)
        return self._end()

    def drop(self, number: int, reason: str) -> Round | None:
        """The prompt will have no reward; the round, if that completes it."""
        if self.round is None or (self.leases.close(number) or self.replay.remove(number)) is None:
            return None
        self.round.unusable.append(reason)
        return self._end()

    def _end(self) -> Round | None:
        assert self.round
        if not self.round.complete:
            return None
        finished, self.round = self.round, None
        self.results[finished.label] = finished.mean()
        self.steps[finished.label] = finished.step
        return finished
