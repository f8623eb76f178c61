"""Which groups each step trained on, in order: the trainer's redo log.

Steps that a durable checkpoint covers are forgotten: the run's ``ledger.jsonl`` and archive have them. What stays is
their number and how many groups they had.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from penstock.services.broker.rules.journal import Journal


class LedgerError(ValueError):
    """A step that cannot be taken or committed; says why."""


@dataclass(slots=True)
class Step:
    """One step: taken once, with the same groups ever after; committed by the trainer that trained it."""

    step: int
    groups: list[int]
    seed: int
    max_lag: int
    """The bound that it was taken under: a run may be resumed with another one."""
    taken_at: float
    """Of `clock.now`."""
    digest: str | None = None
    """Of the version that the step yielded; None until it is committed."""
    columns: list[str] = field(default_factory=list)
    """Columns that a learner has written of it since it was taken."""


class Ledger:
    """The steps, in order; ``steps`` are those that no durable checkpoint covers."""

    TABLE = "ledger"

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        base = journal.rows("counters").get(self.TABLE, {"steps": 0, "groups": 0})
        self._forgotten, self._groups_forgotten = base["steps"], base["groups"]
        rows = sorted(journal.rows(self.TABLE).values(), key=lambda row: row["step"])
        self.steps = [Step(**row) for row in rows]

    @property
    def first(self) -> int:
        """The first step that no durable checkpoint covers."""
        return self._forgotten

    @property
    def length(self) -> int:
        """Steps taken so far."""
        return self._forgotten + len(self.steps)

    @property
    def groups(self) -> int:
        """Groups taken so far."""
        return self._groups_forgotten + sum(len(step.groups) for step in self.steps)

    @property
    def committed(self) -> int:
        """Steps committed so far, which is the newest version."""
        return self.length - sum(step.digest is None for step in self.steps[-2:])

    def taken(self, step: int) -> Step | None:
        """The step, where it was taken already. Raises `LedgerError` for one that was forgotten."""
        if step < self._forgotten:
            raise LedgerError(
                f"step {step} cannot be redone: a checkpoint of version {self._forgotten} covered it; restore that one"
            )
        return self.steps[step - self._forgotten] if step < self.length else None

    @property
    def may_take(self) -> bool:
        """The next step may be taken now."""
        # One step ahead: its gradient is computed while the version before it is gathered, committed and published.
        return len(self.steps) < 2 or self.steps[-2].digest is not None

    def take(self, step: int, groups: list[int], seed: int, max_lag: int, now: float) -> Step:
        """``step`` trains on ``groups``, no token of which is more than ``max_lag`` versions old: for good."""
        if step != self.length:
            raise LedgerError(f"step {step} cannot be taken: {self.length} is next")
        if not self.may_take:
            raise LedgerError(f"step {step} cannot be taken before step {step - 2} is committed")
        taken = Step(step, groups, seed, max_lag, now)
        self.steps.append(taken)
        self._write(taken)
        return taken

    def commit(self, step: int, groups: list[int], digest: str) -> bool:
        """``step`` is trained on ``groups``. False where it was committed before: a repeated message, or a step that
        was redone and, without determinism, may have another digest now."""
        taken = self.taken(step)
        if taken is None:
            raise LedgerError(f"step {step} was never taken")
        if step > self.committed:
            raise LedgerError(f"step {step} cannot be committed before step {self.committed}")
        if taken.groups != groups:
            raise LedgerError(
                f"step {step} is of the groups {taken.groups}, and was trained on {groups}: the store has lost it and "
                "it was taken again; start the trainer again, which redoes it"
            )
        first = taken.digest is None
        if taken.digest != digest:
            taken.digest = digest
            self._write(taken)
        return first

    def describe(self, step: int, column: str) -> None:
        """A learner has written ``column`` of the step."""
        taken = self.taken(step)
        if taken is None:
            raise LedgerError(f"step {step} was never taken")
        if column not in taken.columns:
            taken.columns.append(column)
            self._write(taken)

    def merge(self, step: int, groups: list[int], seed: int, max_lag: int, digest: str, now: float) -> bool:
        """The trainer remembers committing ``step``. True where the ledger did not have it: the store has lost it."""
        if step < self._forgotten:
            return False
        known = self.taken(step)
        if known and known.digest:
            return False
        if known is None:
            if not self.length:
                self._begin_at(step, len(groups))
            if step != self.length:
                raise LedgerError(f"the trainer remembers step {step}, but the ledger ends at step {self.length}")
            known = Step(step, groups, seed, max_lag, now)
            self.steps.append(known)
        known.digest = digest
        self._write(known)
        return True

    def _begin_at(self, step: int, groups: int) -> None:
        """The store is new, the trainer is not: steps before ``step`` were as large, as far as anybody knows."""
        self._forgotten, self._groups_forgotten = step, step * groups
        self._count()

    def covered(self, version: int) -> list[Step]:
        """The steps that a durable checkpoint of ``version`` covers and that were not forgotten."""
        return [step for step in self.steps if step.step < version and step.digest is not None]

    def forget(self, steps: list[Step]) -> None:
        """Forgets the first ``steps``."""
        for step in steps:
            assert step is self.steps[0]
            self.steps.pop(0)
            self._forgotten += 1
            self._groups_forgotten += len(step.groups)
            self._journal.delete(self.TABLE, step.step)
        if steps:
            self._count()

    def _count(self) -> None:
        counters = {"steps": self._forgotten, "groups": self._groups_forgotten}
        self._journal.put("counters", self.TABLE, counters)

    def _write(self, step: Step) -> None:
        self._journal.put(self.TABLE, step.step, asdict(step))
