"""The life of every training group under the gate: numbered, leased, finished, scored, taken, freed or dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

import structlog

from penstock.protocols.columns import Column
from penstock.protocols.messages import LedgerRow
from penstock.services.broker import clock
from penstock.services.broker.rules.filtering import Verdict
from penstock.services.broker.rules.gate import Gate
from penstock.services.broker.rules.journal import Journal
from penstock.services.broker.rules.leases import Lease, Leases
from penstock.services.broker.rules.ledger import Ledger, Step
from penstock.services.broker.rules.replay_buffer import Replay

log = structlog.get_logger()

DropKind = Literal["prompt", "reward", "unusable", "unanswered", "filtered", "too_old"]
"""Why a group is dropped: its prompt cannot be used (empty, too long, …); too few of its answers have a reward; a
scorer cannot score it, or what is kept of its sessions cannot be sent; nobody answered it often enough; `replay.filter`
leaves it out; it is too old after a resume."""


class GroupTracker:
    """Every rule about which group may be generated, trained on or dropped is applied here.

    ``columns`` is what a group needs before it may be trained on, ``steps`` how many steps the run has, ``draws`` how
    many prompts there are (None: no end), ``prefetch`` how many groups may be under way beyond those taken (None: as
    many as the gate allows), ``release`` is told the number of each group whose payload is not needed any more,
    ``on_drop`` each drop with its reason and kind; ``choose`` says which draw is made next, of those from one on;
    ``source_of`` which source a group is of, where its row does not.
    """

    def __init__(
        self,
        journal: Journal,
        gate: Gate,
        columns: Sequence[Column],
        steps: int,
        draws: int | None,
        prefetch: int | None,
        release: Callable[[int], None],
        on_drop: Callable[[int, str, DropKind], None],
        choose: Callable[[int], int] = lambda draw: draw,
        source_of: Callable[[int], str] = lambda number: "",
    ) -> None:
        self._journal = journal
        self._release, self._on_drop, self._choose = release, on_drop, choose
        self.gate, self.steps, self.draws = gate, steps, draws
        # Fewer than a step's worth, with what the window may leave behind, and the trainer would wait for ever.
        self.prefetch = max(prefetch, gate.batch + gate.window - 1) if prefetch else 1 << 62
        self.leases = Leases(journal)
        self.replay = Replay(journal, columns, source_of)
        self.ledger = Ledger(journal)
        self.told = False
        """The trainer has said which steps it remembers, since this process began."""
        self._recent_drops = {int(number) for number in journal.rows("dropped")}
        self._forgotten_drops = journal.rows("counters").get("dropped", {"count": 0})["count"]
        gate.remember(self._recent_drops, self._forgotten_drops)
        self._count_on()
        self.consecutive_drops = self.consecutive_filtered = 0
        self.last_drop = self.last_filtered = ""
        self.filtered: Counter[str] = Counter(journal.rows("counters").get("filtered", {}))
        """How many groups were filtered so far, by why."""
        for entry in list(self.replay.entries.values()):
            if entry.oldest < gate.required_version(entry.number):
                self.drop(
                    entry.number,
                    f"from version {entry.oldest}, too old for the bound that the run was resumed with",
                    "too_old",
                )
        self.consecutive_drops = 0

    def _count_on(self) -> None:
        """Steps are counted on from those taken, which may have had another B and W. One that was taken is trained,
        however few the run is to have now."""
        self.gate.steps, self.gate.groups = self.ledger.length, self.ledger.groups
        self.steps = max(self.steps, self.ledger.length)
        untrained = self.leases.open.keys() | self.replay.entries.keys()
        between = range(min(untrained, default=self.leases.next_number), self.leases.next_number)
        others = untrained | self._recent_drops
        self.gate.ahead = [number for number in between if number not in others]

    def _beyond_the_end(self, number: int) -> bool:
        """A group with this number would be trained in no step."""
        gate = self.gate
        return gate.rank(number) - gate.groups >= (self.steps - gate.steps) * gate.batch

    @property
    def drops(self) -> int:
        """Groups dropped so far."""
        return self._forgotten_drops + len(self._recent_drops)

    @property
    def drawn_out(self) -> bool:
        """The prompts are used up."""
        return self.draws is not None and self.leases.next_draw >= self.draws

    def next_lease(self, version: int, sound: bool = False) -> Lease | None:
        """The group that a rollout serving ``version`` may generate now, a repeated one first, ``sound``: but no
        suspect; None while the gate is shut, at the last step and at the end of the prompts."""
        lease = self.leases.waiting(sound)
        if lease:
            return lease if version >= self.gate.required_version(lease.number) else None
        number = self.leases.next_number
        if self._beyond_the_end(number) or self.drawn_out:
            return None
        if len(self.leases.open) + len(self.replay.entries) >= self.prefetch:
            return None
        if version < self.gate.required_version(number):
            return None
        self.leases.go_to(self._choose(self.leases.next_draw))
        return None if self.drawn_out else self.leases.new()

    def blocked_lease(self) -> int | None:
        """The version that the next grant asks for; None where there is nothing to grant."""
        lease = self.leases.waiting()
        number = lease.number if lease else self.leases.next_number
        if not lease and (self._beyond_the_end(number) or self.drawn_out):
            return None
        return self.gate.required_version(number)

    def finish(self, number: int, oldest: int, trajectories: int = 1, tokens: int = 1, source: str = "") -> bool:
        """A group is finished, ``oldest`` the lowest version among its tokens (-1: it has none). False where it was
        already, or is gone: its answer does not count again. It is gone, too, where it is too old: for a bound that a
        resumed run has lowered, or because its engine does not do as it was told."""
        if number in self.leases.open and 0 <= oldest < (required := self.gate.required_version(number)):
            reason = f"from version {oldest}, and version {required} is the oldest that is allowed"
            self.without_failure(number, reason)
            return False
        oldest = max(oldest, 0)
        lease = self.leases.close(number)
        if lease is None:
            return False
        self.replay.add(number, lease.draw, oldest, trajectories, tokens, source)
        return True

    def merge(self, tail: Sequence[LedgerRow]) -> None:
        """The trainer remembers committing these steps: what the store has lost of them is true again."""
        self.told = True
        new, now = not self.ledger.length, clock.now()
        lost: list[LedgerRow] = []
        try:
            for row in tail:
                if self.ledger.merge(row.step, row.groups, row.seed, row.max_lag, row.digest, now):
                    lost.append(row)
        finally:  # of a tail that is refused, what is in the ledger now is not generated again
            if lost:
                self._found(lost, new)

    def _found(self, lost: list[LedgerRow], new: bool) -> None:
        numbers = [number for step in lost for number in step.groups]
        log.warning("merged steps that the store had lost", steps=[step.step for step in lost])
        if new and lost[0].step and numbers:  # numbers before them that no step took were dropped
            self._count_forgotten(max(0, min(numbers) - (self.ledger.groups - len(numbers))))
            self.leases.next_number = self.leases.next_draw = min(numbers)
        # Whatever was under way is generated again.
        self.leases.skip_to(max(numbers, default=-1) + 1)
        for number in numbers:
            self.leases.close(number)
            self.replay.remove(number)
        self._count_on()

    def filter(self, number: int, verdict: Verdict) -> None:
        """The group is sound, but teaches nothing: it is dropped, which is no failure, and ends a series of those."""
        self.drop(number, f"filtered: {verdict.words}", "filtered")
        self.consecutive_drops = 0
        self.consecutive_filtered += 1
        self.last_filtered = f"group {number}: {verdict.words}"
        self.filtered[verdict.why] += 1
        self._journal.put("counters", "filtered", dict(self.filtered))

    def without_failure(self, number: int, reason: str) -> None:
        """It is of before, and no use now: it is dropped, and nobody has failed."""
        failures = self.consecutive_drops
        self.drop(number, reason, "too_old")
        self.consecutive_drops = failures

    def _count_forgotten(self, drops: int) -> None:
        self._forgotten_drops = drops
        self.gate.remember(self._recent_drops, drops)
        self._journal.put("counters", "dropped", {"count": drops})

    def drop(self, number: int, reason: str, kind: DropKind) -> None:
        """The group will never be trained on. Nothing is dropped once a step has taken it."""
        closed = self.leases.close(number) or self.replay.remove(number)
        if closed is None:
            return
        self.gate.drop(number)
        self._recent_drops.add(number)
        self._journal.put("dropped", number, {})
        self._on_drop(number, reason, kind)
        self._release(number)
        self.consecutive_drops += 1
        self.last_drop = f"group {number}: {reason}"
        log.warning("group dropped", group=number, reason=reason)

    def scored(self, number: int, column: str) -> bool:
        """A scorer has written ``column`` of a group; False for a repeated answer."""
        return self.replay.scored(number, column)

    def keep(self) -> None:
        """A group that lacks nothing more is there to be trained on: a series of drops has ended."""
        self.consecutive_drops = self.consecutive_filtered = 0

    def take(self, step: int, seed: int) -> Step | None:
        """The groups of ``step``: those of the ledger where it was taken before, else the lowest eligible ones; None
        while there are not enough. The last step takes what the end of the prompts has left."""
        known = self.ledger.taken(step)
        if known:
            return known
        eligible = self.gate.eligible(self.replay.ready(), self.oldest_open())
        if self.drawn_out and not self.leases.open and self.replay.oldest_unready() is None:
            batch = min(self.gate.batch, len(eligible))
        else:
            batch = self.gate.batch
        if not batch or len(eligible) < batch or step >= self.steps:
            return None
        taken = self.ledger.take(step, eligible[:batch], seed, self.gate.max_lag, clock.now())
        for number in taken.groups:
            self.replay.remove(number)
        return taken

    def ended(self, step: int) -> bool:
        """There is no such step and never will be."""
        if step >= self.steps:
            return True
        idle = not self.leases.open and not self.replay.entries
        return self.drawn_out and idle and self.ledger.taken(step) is None

    def oldest_open(self) -> int:
        """h: the lowest number that is neither ready to be trained on nor dropped; the next number counts as open."""
        unready = self.replay.oldest_unready()
        unfinished = next(iter(self.leases.open), None)
        numbers = [n for n in (unready, unfinished) if n is not None]
        return min(numbers, default=self.leases.next_number)

    def free(self, covered: list[Step]) -> None:
        """A durable checkpoint covers these first steps: their groups are needed no more."""
        for step in covered:
            for number in step.groups:
                self._release(number)
        self.ledger.forget(covered)
        known = [self.oldest_open(), *self.replay.entries, *(n for step in self.ledger.steps for n in step.groups)]
        forgotten = self.gate.forget_below(min(known))
        for number in forgotten:
            self._recent_drops.discard(number)
            self._journal.delete("dropped", number)
        if forgotten:
            self._forgotten_drops += len(forgotten)
            self._journal.put("counters", "dropped", {"count": self._forgotten_drops})
