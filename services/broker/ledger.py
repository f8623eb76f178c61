"""Which groups each step trained on, in order: the trainer's redo log."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from services.broker.leases import Journal


class LedgerError(ValueError):
    """A step that cannot be taken or committed; says why."""


@dataclass(slots=True)
class Step:
    """One step: taken once, with the same groups ever after; committed by the trainer that trained it."""

    step: int
    groups: list[int]
    seed: int
    taken_at: float
    """Wall-clock seconds."""
    digest: str | None = None
    """Of the version that the step yielded; None until it is committed."""
    freed: bool = False
    """A durable checkpoint covers it: its groups' payloads are gone."""


class Ledger:
    """The steps, in order."""

    TABLE = "ledger"

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        rows = sorted(journal.rows(self.TABLE).values(), key=lambda row: row["step"])
        self.steps = [Step(**row) for row in rows]

    @property
    def committed(self) -> int:
        """Number of committed steps, which is the newest version."""
        return sum(step.digest is not None for step in self.steps[-2:]) + max(0, len(self.steps) - 2)

    def taken(self, step: int) -> Step | None:
        """The step, where it was taken already."""
        return self.steps[step] if 0 <= step < len(self.steps) else None

    def take(self, step: int, groups: list[int], seed: int, now: float) -> Step:
        """``step`` trains on ``groups``, from now on and for good."""
        if step != len(self.steps):
            raise LedgerError(f"step {step} cannot be taken: {len(self.steps)} is next")
        if self.steps and self.steps[-1].digest is None:
            raise LedgerError(f"step {step} cannot be taken before step {step - 1} is committed")
        taken = Step(step, groups, seed, now)
        self.steps.append(taken)
        self._write(taken)
        return taken

    def commit(self, step: int, digest: str) -> bool:
        """``step`` is trained. False where it was committed before: a repeated message, or a step that was redone and,
        without determinism, may have another digest now."""
        taken = self.taken(step)
        if taken is None:
            raise LedgerError(f"step {step} was never taken")
        first = taken.digest is None
        if taken.digest != digest:
            taken.digest = digest
            self._write(taken)
        return first

    def merge(self, step: int, groups: list[int], seed: int, digest: str, now: float) -> bool:
        """The trainer remembers committing ``step``. True where the ledger did not have it: the store has lost it."""
        known = self.taken(step)
        if known and known.digest:
            return False
        if known is None:
            if step != len(self.steps):
                raise LedgerError(f"the trainer remembers step {step}, but the ledger ends at step {len(self.steps)}")
            known = Step(step, groups, seed, now)
            self.steps.append(known)
        known.digest = digest
        self._write(known)
        return True

    def free(self, version: int) -> list[Step]:
        """A durable checkpoint holds ``version``: the steps that it newly covers."""
        covered = [step for step in self.steps[:version] if step.digest is not None and not step.freed]
        for step in covered:
            step.freed = True
            self._write(step)
        return covered

    def _write(self, step: Step) -> None:
        self._journal.put(self.TABLE, step.step, asdict(step))
