"""Rounds of held-out prompts: the same life as that of training groups, but for the gate and the ledger."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from typing import Any

from penstock.protocols.columns import Column
from penstock.services.broker.rules.journal import Journal, Volatile
from penstock.services.broker.rules.leases import Leases
from penstock.services.broker.rules.replay_buffer import Replay


@dataclass(slots=True)
class Round:
    """One evaluation: ``exact`` is the version that every token must come from, None for those from ``step`` on."""

    label: str
    step: int
    exact: int | None
    size: int
    rewards: dict[str, list[float]] = field(default_factory=dict)
    """By set, of the prompts that are done: the mean over their trajectories."""
    scores: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """By set and by name (``pass@4``, ``maj@8``), of the prompts that have several answers."""
    parts: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """By set and by name (``reward/exact_match``, ``response_tokens``), of the prompts that have it."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    """What is kept of its answers for people, once it is complete."""
    versions: list[int] = field(default_factory=list)
    """The oldest and the newest of each group's tokens."""
    unusable: list[str] = field(default_factory=list)
    """Why a prompt has no reward."""

    @property
    def least(self) -> int:
        """The oldest version that a token may come from."""
        return self.step if self.exact is None else self.exact

    def answered_by(self, oldest: int, newest: int) -> bool:
        """Tokens of these versions are an answer to it."""
        return oldest >= self.least and (self.exact is None or newest == self.exact)

    @property
    def complete(self) -> bool:
        """Every prompt has its reward, or never will."""
        return self.answered + len(self.unusable) == self.size

    @property
    def answered(self) -> int:
        """Prompts that have a reward."""
        return sum(map(len, self.rewards.values()))

    def mean(self) -> float | None:
        """Mean reward over the prompts of all sets that have one; None where none has."""
        return sum(map(sum, self.rewards.values())) / self.answered if self.answered else None

    def means(self) -> dict[str, float]:
        """The mean of each set; and, as ``SET/pass@4``, those of what several answers tell."""
        found = {name: sum(rewards) / len(rewards) for name, rewards in self.rewards.items()}
        return found | _means(self.scores)

    def means_of_parts(self) -> dict[str, float]:
        """As ``SET/reward/exact_match``: what the reward is made of, and what the answers are like."""
        return _means(self.parts)


def _means(of_sets: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, float]:
    return {f"{name}/{what}": sum(values) / len(values) for name, of in of_sets.items() for what, values in of.items()}


def pass_at(answers: int, passed: int) -> dict[str, float]:
    """pass@k for k = 1, 2, 4 … up to all of so many ``answers``, of which so many have ``passed``: the chance that one
    of k passes, drawn without replacement (Chen et al. 2021, arXiv:2107.03374, eq. 1).

    >>> pass_at(4, 1)
    {'pass@1': 0.25, 'pass@2': 0.5, 'pass@4': 1.0}
    """
    sizes = sorted({*(2**power for power in range(answers.bit_length()) if 2**power <= answers), answers})
    return {f"pass@{k}": 1 - comb(answers - passed, k) / comb(answers, k) for k in sizes}


def majority(answers: Sequence[str | None], rewards: Sequence[float]) -> float:
    """The reward of what most ``answers`` say, the first of them where several are as many; None says nothing, and is
    right for nobody (Wang et al. 2022, arXiv:2203.11171).

    >>> majority(["7", "8", "8", None], [1.0, 0.0, 0.0, 0.0])
    0.0
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    return rewards[answers.index(votes.most_common(1)[0][0])]


LEAST = 0.5
"""A round in which a smaller share of the prompts had a reward says too little of a version to compare it by."""


class Evaluation:
    """The round in progress, if any, and the results of those before it, which alone are durable: a round that a crash
    cuts short is run again."""

    TABLE = "evaluations"

    def __init__(
        self,
        journal: Journal,
        size: int,
        columns: Sequence[Column],
        set_of: Callable[[int], str] = lambda draw: "",
    ) -> None:
        self._journal, self.size, self._set_of = journal, size, set_of
        self.round: Round | None = None
        self.results: dict[str, float | None] = {}
        """Label to mean reward; None where no prompt had one."""
        self.by_set: dict[str, dict[str, float]] = {}
        """Label to the mean reward of each set, and what several answers tell: `Round.means`."""
        self.parts: dict[str, dict[str, float]] = {}
        """Label to `Round.means_of_parts`."""
        self.steps: dict[str, int] = {}
        """Label to the step it was made at."""
        self.made = 0
        """How many rounds there were."""
        self._number: dict[str, int] = {}
        """Label to which of them it was."""
        self._few: set[str] = set()
        """Labels of rounds of which fewer than `LEAST` had a reward."""
        for label, row in sorted(journal.rows(self.TABLE).items(), key=lambda item: item[1]["made"]):
            self._keep(label, row)
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

    def finish(self, number: int, oldest: int, newest: int, trajectories: int, tokens: int, source: str = "") -> bool:
        """A rollout has answered. False where the answer does not count: repeated, or of a wrong version, which is
        asked for again."""
        lease = self.leases.open.get(number)
        if self.round is None or lease is None:
            return False
        said = oldest >= 0  # where an environment failed at once, the policy has said nothing, in no version
        if said and not self.round.answered_by(oldest, newest):
            self.leases.holds.free(number)
            return False
        self.leases.close(number)
        self.replay.add(number, lease.draw, oldest, trajectories, tokens, source)
        if said:
            self.round.versions += [oldest, newest]
        return True

    def score(
        self, number: int, reward: float, scores: Mapping[str, float] | None = None,
        parts: Mapping[str, float] | None = None,
    ) -> Round | None:  # fmt: skip
        """The group has all its columns, this mean reward, ``scores`` of its several answers, and ``parts``; the round,
        if that completes it."""
        entry = self.replay.remove(number) if self.round else None
        if self.round is None or entry is None:
            return None
        name = self._set_of(entry.draw)
        self.round.rewards.setdefault(name, []).append(reward)
        for kept, found in ((self.round.scores, scores or {}), (self.round.parts, parts or {})):
            for what, value in found.items():
                kept.setdefault(name, {}).setdefault(what, []).append(value)
        return self._end()

    def open(self, number: int) -> bool:
        """The prompt may still have a reward."""
        return self.round is not None and (number in self.leases.open or number in self.replay.entries)

    def drop(self, number: int, reason: str) -> Round | None:
        """The prompt will have no reward; the round, if that completes it."""
        if self.round is None or (self.leases.close(number) or self.replay.remove(number)) is None:
            return None
        self.round.unusable.append(reason)
        return self._end()

    def recall(self, row: Mapping[str, Any]) -> None:
        """What metrics.jsonl says of an earlier round, where the store knows of none."""
        answered, unusable = row.get("prompts", 1), row.get("unusable", 0)
        few = answered < LEAST * (answered + unusable)
        self._put(row["label"], row["step"], row["reward"], row["sets"], row.get("parts", {}), few)

    def course(self, by: str | None = None, after: int = 0) -> list[tuple[int, float]]:
        """Step and mean reward of each evaluation that has one, by step: over all prompts, or what ``by`` names: a set,
        or one of its `parts` or scores.
        Of two after the same step the last one counts, of which the first ``after`` rounds are none; one in which most
        prompts had no reward, whose judge was away say, does not."""
        found = {label: self._named(label, by) if by else reward for label, reward in self.results.items()}
        course: dict[int, float] = {}
        for label, reward in found.items():
            if reward is not None and label not in self._few and self._number[label] > after:
                course[self.steps[label]] = reward
        return sorted(course.items())

    def _named(self, label: str, by: str) -> float | None:
        return (self.parts.get(label, {}) | self.by_set.get(label, {})).get(by)

    def _end(self) -> Round | None:
        assert self.round
        if not self.round.complete:
            return None
        finished, self.round = self.round, None
        few = sum(map(len, finished.rewards.values())) < LEAST * self.size
        told = finished.means(), finished.means_of_parts()
        self._put(finished.label, finished.step, finished.mean(), *told, few)
        return finished

    def _put(
        self, label: str, step: int, reward: float | None, by_set: Mapping[str, float], parts: Mapping[str, float],
        few: bool,
    ) -> None:  # fmt: skip
        self._put_aside(label, step)
        row = {"reward": reward, "by_set": by_set, "parts": parts, "step": step, "made": self.made + 1, "few": few}
        self._keep(label, row)
        self._journal.put(self.TABLE, label, row)

    def _put_aside(self, label: str, made_at: int) -> None:
        """A run that goes on behind its end has another one ``after``: the one before is that of its step from now
        on."""
        step = self.steps.get(label, made_at)
        if step == made_at or (other := f"step {step}") in self.results:
            return
        row = {"reward": self.results[label], "by_set": self.by_set[label], "step": step, "made": self._number[label]}
        row |= {"parts": self.parts[label], "few": label in self._few}
        self._keep(other, row)
        self._journal.put(self.TABLE, other, row)

    def _keep(self, label: str, row: Mapping[str, Any]) -> None:
        for known in (self.results, self.by_set, self.parts, self.steps):
            known.pop(label, None)  # what is measured again is the newest
        self.results[label], self.by_set[label], self.steps[label] = row["reward"], row["by_set"], row["step"]
        self.parts[label] = row.get("parts", {})  # a store of older code has none
        self._number[label] = row["made"]
        self.made = max(self.made, row["made"])
        (self._few.add if row.get("few") else self._few.discard)(label)
