"""Held-out prompts, answered greedily and scored; never numbered with the training groups, never trained on."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from penstock.protocols.messages import EVALUATION


@dataclass(slots=True)
class EvalGroup:
    """One evaluation prompt on its way: waiting, with a rollout, with the reward, or scored."""

    number: int
    index: int
    holder: str | None = None
    deadline: float = 0.0
    """Wall-clock seconds after which the holder has lost it, unless its heartbeats renew it."""
    experience: bytes | None = None
    versions: tuple[int, int] | None = None
    """Lowest and highest version among its tokens."""
    reward: float | None = None


@dataclass(slots=True)
class Round:
    """One evaluation: ``exact`` is the version that every token must come from, None for whatever is served."""

    label: str
    step: int
    exact: int | None
    groups: dict[int, EvalGroup] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Every prompt has its score."""
        return all(group.reward is not None for group in self.groups.values())

    def mean(self) -> float:
        """Mean reward."""
        return sum(group.reward or 0.0 for group in self.groups.values()) / max(1, len(self.groups))


class Evaluation:
    """The round in progress, if any, and the results of those before it. Not durable: a round that a crash cuts short
    is run again."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.round: Round | None = None
        self.results: dict[str, float] = {}
        """Label to mean reward."""
        self.steps: dict[str, int] = {}
        """Label to the step it was made at."""
        # A broker that was started again must not take a late answer to the round before for one of this.
        self._next = EVALUATION - (time.time_ns() // 1_000_000 % (1 << 40)) * 1_000

    def start(self, label: str, step: int, exact: int | None) -> None:
        """Begins a round; only one at a time."""
        assert self.round is None
        self.round = Round(label, step, exact)
        for index in range(self.size):
            self.round.groups[self._next] = EvalGroup(self._next, index)
            self._next -= 1

    def waiting(self) -> EvalGroup | None:
        """A prompt that nobody generates."""
        groups = self.round.groups.values() if self.round else ()
        return next((g for g in groups if g.holder is None and g.experience is None), None)

    def get(self, number: int) -> EvalGroup | None:
        """The prompt of the round in progress."""
        return self.round.groups.get(number) if self.round else None

    def finished(self, number: int, experience: bytes, versions: tuple[int, int]) -> bool:
        """A rollout has answered. False where the answer does not count: repeated, or of a wrong version."""
        group = self.get(number)
        if group is None or group.experience is not None:
            return False
        assert self.round
        group.holder = None
        if self.round.exact is not None and versions != (self.round.exact, self.round.exact):
            return False
        group.experience, group.versions = experience, versions
        return True

    def unscored(self) -> list[EvalGroup]:
        """Answers that wait for the reward and that nobody works on."""
        groups = self.round.groups.values() if self.round else ()
        return [g for g in groups if g.experience is not None and g.reward is None and g.holder is None]

    def hold(self, group: EvalGroup, holder: str, deadline: float) -> None:
        """``holder`` generates or scores it."""
        group.holder, group.deadline = holder, deadline

    def release(self, holder: str) -> None:
        """``holder`` is gone."""
        for group in self.round.groups.values() if self.round else ():
            if group.holder == holder:
                group.holder = None

    def renew(self, holder: str, holding: set[int], deadline: float) -> None:
        """A heartbeat of ``holder``, which works on ``holding``."""
        for number in holding & self.round.groups.keys() if self.round else ():
            group = self.get(number)
            if group and group.holder == holder:
                group.deadline = deadline

    def expire(self, now: float) -> list[str]:
        """What is past its deadline waits again; returns who held it, once for each prompt."""
        late = [g for g in (self.round.groups.values() if self.round else ()) if g.holder and g.deadline < now]
        holders = [group.holder for group in late if group.holder]
        for group in late:
            group.holder = None
        return holders

    def score(self, number: int, reward: float) -> Round | None:
        """The reward of one prompt; the round, if that completes it."""
        group = self.get(number)
        if group is None or group.reward is not None:
            return None
        assert self.round
        group.reward, group.holder = reward, None
        if not self.round.complete:
            return None
        finished, self.round = self.round, None
        self.results[finished.label] = finished.mean()
        self.steps[finished.label] = finished.step
        return finished
