"""The life of groups as a state machine with crashes: what the properties are checked on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.protocols.columns import Column
from penstock.services.broker.rules.gate import Gate
from penstock.services.broker.rules.groups import GroupTracker
from penstock.services.broker.rules.ledger import Step

COLUMN = Column(name="reward/exact", scorer="reward", nullable=True)
COLUMNS = [COLUMN]


class Memory:
    """A journal whose turns become durable all at once, or not at all."""

    def __init__(self) -> None:
        self.durable: dict[str, dict[str, dict[str, Any]]] = {}
        self._queued: list[tuple[str, str, dict[str, Any] | None]] = []
        self.torn = False
        """The turn at hand will never become durable."""

    def put(self, table: str, key: str | int, row: dict[str, Any]) -> None:
        self._queued.append((table, str(key), copy.deepcopy(row)))

    def delete(self, table: str, key: str | int) -> None:
        self._queued.append((table, str(key), None))

    def rows(self, table: str) -> dict[str, dict[str, Any]]:
        return copy.deepcopy(self.durable.get(table, {}))

    def commit(self) -> None:
        if self.torn:
            return
        for table, key, row in self._queued:
            rows = self.durable.setdefault(table, {})
            if row is None:
                rows.pop(key, None)
            else:
                rows[key] = row
        self._queued.clear()

    def crash(self) -> None:
        self._queued.clear()


@dataclass
class Holder:
    """A rollout: what it serves, and the groups that it generates, each with the oldest version among its tokens."""

    name: str
    version: int
    incarnation: int = 0
    work: dict[int, int] = field(default_factory=dict)
    """Group to the version that its first token came from."""
    finished: dict[int, int] = field(default_factory=dict)
    """Said to be finished, not acknowledged yet."""

    @property
    def identity(self) -> str:
        return f"{self.name}#{self.incarnation}"


class World:
    """A broker's groups, a trainer with checkpoints, some rollouts. Every method is one transition; `check` holds after
    each. Sub-classes break a rule, to show that the properties notice."""

    def __init__(self, batch: int, window: int, max_lag: int, steps: int, rollouts: int) -> None:
        self.settings = (batch, window, max_lag, steps)
        self.max_lag, self.batch, self.steps = max_lag, batch, steps
        self.journal = Memory()
        self.dropped: set[int] = set()
        self.groups = self.make_groups()
        self.journal.commit()
        self.trainer_version = 0
        self.checkpoint = 0
        self.published = 0
        self.taken: Step | None = None
        self.pending: Step | None = None
        """Trained, and not committed yet."""
        self.trained: dict[int, int] = {}
        """Group to the step that trained on it, on the present timeline."""
        self.tokens: dict[int, int] = {}
        """Finished and acknowledged group to its oldest version."""
        self.holders = [Holder(f"rollout-{i}", 0) for i in range(rollouts)]
        self.crashes = self.transitions = 0
        self.payloads: set[int] = set()

    def make_groups(self) -> GroupTracker:
        batch, window, max_lag, steps = self.settings
        gate = self.make_gate(batch, window, max_lag)
        return GroupTracker(self.journal, gate, COLUMNS, steps, None, None, self.release, self.dropped_)

    def make_gate(self, batch: int, window: int, max_lag: int) -> Gate:
        return Gate(batch, window, max_lag)

    def dropped_(self, number: int, _reason: str, _kind: str) -> None:
        self.dropped.add(number)

    def release(self, number: int) -> None:
        self.payloads.discard(number)

    # --- rollouts ----------------------------------------------------------------------------------------------------

    def believed_version(self, holder: Holder) -> int:
        """What the broker grants by."""
        return holder.version

    def grant(self, holder: Holder) -> bool:
        lease = self.groups.next_lease(self.believed_version(holder))
        if lease is None:
            return False
        self.groups.leases.grant(lease, holder.identity, 0.0)
        self.journal.commit()
        holder.work[lease.number] = holder.version
        return True

    def finish(self, holder: Holder, number: int) -> None:
        """Says it; the broker acknowledges; from then on the rollout forgets it."""
        oldest = holder.work.pop(number)
        if self.groups.finish(number, self.said(oldest)):
            self.tokens[number] = oldest
            self.payloads.add(number)
        self.journal.commit()

    def said(self, oldest: int) -> int:
        """The lowest version among a group's tokens, as the broker is told."""
        return oldest

    def say_twice(self, number: int) -> None:
        """A repeated or late answer for a group that is finished already."""
        assert not self.groups.finish(number, 0)

    def expire(self, number: int) -> None:
        holder = self.groups.leases.holder(number)
        if holder:
            self.groups.leases.holds.release(holder)
            self.journal.commit()

    def restart_rollout(self, holder: Holder) -> None:
        """Killed: it holds nothing, serves nothing, and has a new incarnation."""
        self.groups.leases.holds.release(holder.identity)
        holder.incarnation += 1
        holder.work.clear()
        holder.version = -1
        self.journal.commit()

    def load(self, holder: Holder) -> None:
        """Takes the newest published version, in the middle of whatever it generates."""
        holder.version = self.published

    # --- scorers -----------------------------------------------------------------------------------------------------

    def score(self, number: int) -> None:
        self.groups.scored(number, COLUMN.name)
        self.journal.commit()

    def drop(self, number: int) -> None:
        self.groups.drop(number, "filtered", "filtered")
        self.groups.consecutive_drops = 0
        if number in self.dropped:  # not one that a step has taken
            self.tokens.pop(number, None)
        for holder in self.holders:
            holder.work.pop(number, None)
        self.journal.commit()

    # --- trainer -----------------------------------------------------------------------------------------------------

    def take(self) -> bool:
        taken = self.groups.take(self.trainer_version, 0)
        if taken is None:
            return False
        self.journal.commit()
        self.taken = taken
        return True

    def train(self) -> None:
        """Trains on the step in hand; the theorems are about this moment. The step before is committed by its end."""
        assert self.taken is not None and self.taken.step == self.trainer_version and self.pending is None
        for number in self.taken.groups:
            assert number in self.payloads, f"group {number} was freed before it was trained on"
            lag = self.trainer_version - self.tokens[number]
            assert 0 <= lag <= self.max_lag, f"group {number} has lag {lag} at step {self.trainer_version}"
            before = self.trained.setdefault(number, self.taken.step)
            assert before == self.taken.step, f"group {number} was trained on in steps {before} and {self.taken.step}"
        self.trainer_version += 1
        self.taken, self.pending = None, self.taken

    def commit(self) -> None:
        """Perhaps while the next step is taken already."""
        assert self.pending is not None
        self.groups.ledger.commit(self.pending.step, self.pending.groups, f"digest-{self.pending.step}")
        self.journal.commit()
        self.pending = None

    def publish(self) -> None:
        if self.trainer_version >= self.groups.ledger.committed:
            self.published = max(self.published, self.trainer_version)

    def save(self) -> None:
        self.checkpoint = self.trainer_version
        self.groups.free(self.groups.ledger.covered(self.checkpoint))
        self.journal.commit()

    def restart_trainer(self) -> None:
        """Killed at any point of a step: back to the checkpoint."""
        self.trainer_version = self.checkpoint
        self.taken = self.pending = None
        self.crashes += 1

    # --- broker ------------------------------------------------------------------------------------------------------

    def restart_broker(self) -> None:
        """Killed between two turns."""
        self.journal.crash()
        self.groups = self.make_groups()
        self.journal.commit()
        self.crashes += 1

    def torn(self, move: Callable[[], Any]) -> None:
        """Killed in the turn of ``move``, before it was durable: nobody heard of it."""
        names = ("tokens", "payloads", "dropped", "trained", "trainer_version")
        names += ("taken", "pending", "published", "checkpoint")
        before = {name: copy.deepcopy(getattr(self, name)) for name in names}
        holders = copy.deepcopy(self.holders)
        self.journal.torn = True
        move()
        self.journal.torn = False
        for name, value in before.items():
            setattr(self, name, value)
        self.holders = holders
        self.restart_broker()

    # --- what must hold ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        ledger = [number for step in self.groups.ledger.steps for number in step.groups]
        assert len(ledger) == len(set(ledger)), "a group is in two steps"
        known = set(ledger) | set(self.trained) | self.dropped | set(self.groups.replay.entries)
        assert set(self.tokens) <= known, f"finished groups are lost: {sorted(set(self.tokens) - known)}"
        assert not set(self.groups.leases.open) & (set(ledger) | set(self.trained)), "a trained group can be leased"

    def settle(self) -> None:
        """With everybody alive and willing, the run ends: nothing stalls."""
        for _ in range(40 * (self.steps + 2) * self.batch):
            if self.trainer_version >= self.steps:
                return
            if self.taken is None:
                self.take()
            if self.pending is not None:
                self.commit()
                self.publish()
            if self.taken is not None:
                self.train()
                self.check()
                continue
            if self.trainer_version >= self.groups.ledger.committed:
                self.published = self.trainer_version  # a waiting trainer publishes to whoever is behind
            for lease in list(self.groups.leases.open.values()):
                holders = {h.identity: h for h in self.holders}
                holder = self.groups.leases.holder(lease.number)
                mine = holders.get(holder or "")
                if mine and lease.number in mine.work:
                    self.finish(mine, lease.number)
                elif holder:
                    self.expire(lease.number)
            for number in [n for n, e in self.groups.replay.entries.items() if e.needs]:
                self.score(number)
            for holder in self.holders:
                self.load(holder)
                self.grant(holder)
            self.check()
        raise AssertionError(f"stalled at step {self.trainer_version} of {self.steps}")
