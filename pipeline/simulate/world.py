"""A whole run in virtual time: the rules are the broker's own, its members are not.

Leases, the gate, replay and ledger are `services.broker.rules`; who has most room is served first, as by the broker's
scheduler. Rollouts, scorers, rewards and the trainer do nothing but take their time. Evaluations are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from penstock.pipeline.config import Config
from penstock.pipeline.resources.loads import longest_response, most_at_once
from penstock.pipeline.resources.placement import is_guest, seats_of
from penstock.pipeline.simulate.clock import Clock, Event
from penstock.pipeline.simulate.costs import Costs
from penstock.pipeline.simulate.critic import Critic
from penstock.pipeline.simulate.engine import Finished, VirtualEngine
from penstock.pipeline.simulate.scorer import Scorer
from penstock.protocols.columns import REWARD
from penstock.services.broker.granting import Suspects, grant_groups
from penstock.services.broker.membership import Member
from penstock.services.broker.rules.gate import Gate
from penstock.services.broker.rules.groups import GroupTracker
from penstock.services.broker.rules.holds import SUSPECT_AFTER
from penstock.services.broker.rules.journal import Volatile
from penstock.services.broker.rules.leases import Lease
from penstock.services.critic.config import shares_devices
from penstock.services.rollout.config import TorchEngineConfig, VllmEngineConfig
from penstock.services.runtime import registry
from penstock.services.runtime.errors import SetupError

TURN_S = 0.002
"""The broker grants at most this often; and for each rollout, which makes a turn of a large fleet longer."""
TURN_ROLLOUT_S = 2e-5
STUCK_S = 1e7
"""A step that takes longer will never end."""


class StuckError(SetupError):
    """The run would not get on; says why."""


@dataclass
class Outcome:
    """Of a simulated run."""

    steps: int
    seconds: float
    """Until the last step was trained."""
    steps_per_s: float
    """After the first step, with which everything begins."""
    tokens_per_s: float
    """Trained on."""
    trainer_busy: float
    """Share of the time."""
    rollouts_busy: float
    """On average over the rollouts."""
    others_busy: dict[str, float]
    """A critic; and by kind, on average over its actors, scorers that compute."""
    lag_mean: float
    """Versions, on average over the trained tokens; and the largest."""
    lag_max: int
    deaths: int


class Rollout:
    """One of them: what the broker knows of it, and its engine."""

    def __init__(self, number: int, engine: VirtualEngine, limit: int) -> None:
        self.member = Member(f"rollout-{number}#0", f"rollout-{number}", "rollout", "", 0, 0.0, credit=limit)
        self.engine, self.limit, self.deaths = engine, limit, 0
        self.alive, self.fetches = True, False
        self.offered = -1
        """Newest version that it may fetch."""


class World:
    """The run of ``config``, at these ``costs``, for ``steps`` steps."""

    def __init__(self, config: Config, costs: Costs, steps: int, seed: int = 0) -> None:
        self._costs, self._steps, self._config = costs, steps, config
        self._random = np.random.default_rng(seed)
        self.clock = Clock(costs.cores)
        engine = config.rollout.engine
        self._n, self._longest = config.sampling.trajectories, longest_response(config)
        self._given = config.rollout.given.count
        # Which source a prompt is from is not known here: each is judged by all, which takes longest.
        columns = [column.model_copy(update={"sources": ()}) for column in config.columns.scored]
        gate = Gate(config.gate.groups_per_step, config.gate.window, config.gate.max_lag)
        self._groups = GroupTracker(
            Volatile(), gate, columns, steps, None, config.gate.prefetch,
            release=lambda number: None, on_drop=lambda number, reason, kind: None,
        )  # fmt: skip
        self._columns = {kind: [c for c in columns if c.scorer == kind] for kind in {c.scorer for c in columns}}
        counts = {kind: registry.actors(config)[kind].count(config) for kind in self._columns}
        self._beside = {k: [self._engines_beside(k, n) for n in range(counts[k])] for k in counts if self._sleeps(k)}
        self._scorers = {
            kind: Scorer(self.clock, counts[kind], partial(self._beside_engines, kind)) if self._sleeps(kind)
            else Scorer(self.clock, counts[kind])
            for kind in self._columns if kind != REWARD
        }  # fmt: skip
        self._in_turn = config.run.colocated and shares_devices(config)
        """The critic has the trainer's devices, too."""
        works = [partial(self._sleep, "critic")] if self._in_turn else []
        self._critic = Critic(self.clock, costs, self._turn, *works) if config.with_critic else None
        self._at_work: set[str] = set()
        """Learners that have the devices of rollouts and reference."""
        slots = most_at_once(config)
        if config.run.deterministic:  # each group is decoded alone
            slots = self._n
        if isinstance(engine, VllmEngineConfig):
            slots *= engine.replicas
        slots = min(slots, costs.most_sequences or slots)
        together = isinstance(engine, TorchEngineConfig)
        limit = config.rollout.most_groups(slots, self._n)
        self._rollouts: list[Rollout] = []
        for number in range(config.rollout.count):
            made = VirtualEngine(self.clock, costs, slots, together, partial(self._finished, number))
            self._rollouts.append(Rollout(number, made, limit))
        self._of = {rollout.member.identity: rollout for rollout in self._rollouts}
        self._made: dict[int, Finished] = {}
        self._suspects: set[int] = set()
        """Groups that were leased too often without an answer."""
        self._version, self._saved = 0, 0
        self._training: Event | None = None
        self._trains = False
        self._colocated = config.run.colocated
        self._turn_due = False
        self._train_s, self._tokens, self._lags = 0.0, 0, 0.0
        self._lag_max, self._deaths, self._redone_s = 0, 0, 0.0
        self._first: tuple[float, int] | None = None

    def run(self, progress: Callable[[int], None] = lambda step: None) -> Outcome:
        """Until all steps are trained; ``progress`` is told each. Raises `StuckError`."""
        for rollout in self._rollouts:
            self.clock.after(0.0, partial(self._serve, rollout, 0))
            self._mortal(self._costs.rollout_lives_s, partial(self._die, rollout))
        self._mortal(self._costs.trainer_lives_s, self._trainer_dies)
        told, at = -1, 0.0
        while self._version < self._steps:
            if not self.clock.step() or self.clock.now - at > STUCK_S:
                raise StuckError(
                    f"step {self._version} would never end: {self.clock.now - at:,.0f} s of it are simulated; do "
                    "processes live long enough (rollout_lives_s, trainer_lives_s) for what they have to do?"
                )
            if self._version != told:
                told, at = self._version, self.clock.now
                progress(told)
        seconds = self.clock.now
        began, steps = self._first or (0.0, 0)
        worked = max(self.clock.worked, 1e-9)
        return Outcome(
            steps=self._version,
            seconds=seconds,
            steps_per_s=(self._version - steps) / max(seconds - began, 1e-9),
            tokens_per_s=self._tokens / seconds,
            trainer_busy=(self._train_s + self._redone_s) / worked,
            rollouts_busy=sum(r.engine.busy_s for r in self._rollouts) / worked / len(self._rollouts),
            others_busy=self._others_busy(worked),
            lag_mean=self._lags / max(1, self._tokens),
            lag_max=self._lag_max,
            deaths=self._deaths,
        )

    def _others_busy(self, worked: float) -> dict[str, float]:
        found = {kind: s.busy_s / worked / s.count for kind, s in self._scorers.items()}
        return found | ({"critic": self._critic.busy_s / worked} if self._critic else {})

    # --- the broker ---------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Soon the broker grants and serves what it can."""
        if not self._turn_due:
            self._turn_due = True
            self.clock.after(TURN_S + TURN_ROLLOUT_S * len(self._rollouts), self._take_turn)

    def _take_turn(self) -> None:
        self._turn_due = False
        self._grant()
        taken = self._groups.ledger.length
        if self._in_turn:  # who has waited longer goes first
            self._take()
        self._take_for_critic()
        self._take()
        if self._groups.ledger.length > taken:  # what was taken leaves room for more
            self._turn()

    def _grant(self) -> None:
        needed = self._groups.blocked_lease()
        if needed is None or needed > self._version:
            return
        rollouts = [r.member for r in self._rollouts if r.member.room > 0 and r.member.version >= 0]
        leases = self._groups.leases
        self._suspects &= leases.open.keys()
        if self._suspects:
            alone = {leases.holder(number) for number in self._suspects}
            rollouts = [member for member in rollouts if member.identity not in alone]
        newest = max((m.version for m in rollouts), default=-1)
        if self._next_group(newest):  # else nobody needs to be put in order
            suspects = Suspects(rollouts, [leases.holds.holders()], self._config.broker.max_attempts)
            grant_groups(self._groups, rollouts, self._next_group, self._lease, suspects)

    def _lease(self, lease: Lease, member: Member) -> None:
        self._groups.leases.grant(lease, member.identity, float("inf"))
        if lease.attempt > SUSPECT_AFTER:
            self._suspects.add(lease.number)
        member.given += 1
        lengths = self._costs.draw_lengths(self._random, self._n, self._longest).tolist()
        given = sum(lengths[: self._given])
        self._of[member.identity].engine.add(lease.number, lengths[self._given :], given)

    def _next_group(self, newest: int, sound: bool = False) -> Lease | None:
        """As the broker's scheduler: what was leased too often without an answer is dropped."""
        while lease := self._groups.next_lease(newest, sound):
            if lease.attempt < self._config.broker.max_attempts:
                return lease
            self._groups.drop(lease.number, "unanswered", "unanswered")
            if self._groups.consecutive_drops >= self._config.broker.max_consecutive_drops:
                raise StuckError(
                    f"{self._groups.consecutive_drops} groups in a row were leased {lease.attempt} times without an "
                    "answer (broker.max_consecutive_drops): rollouts die before they have answered (rollout_lives_s)"
                )
        return None

    def _finished(self, rollout: int, made: Finished) -> None:
        self._rollouts[rollout].member.credit += 1
        if self._groups.finish(made.number, made.oldest, self._n, made.learned):
            self._made[made.number] = made
            for kind, columns in self._columns.items():
                then = partial(self._scored, made.number, [column.name for column in columns])
                if kind == REWARD:
                    took = self._costs.draw_reward_s(self._random, self._n)
                    self.clock.after(took, then)
                else:
                    self._scorers[kind].score(made.learned * self._costs.score_token_s, then)
        self._turn()

    def _scored(self, number: int, columns: list[str]) -> None:
        for column in columns:
            self._groups.scored(number, column)
        self._groups.keep()
        self._turn()

    # --- the trainer --------------------------------------------------------------------------------------------------

    def _there_is(self, step: int) -> bool:
        """What it trains on: taken before (by a trainer that died with it, or by the critic), or to be had."""
        return self._groups.ledger.length > step or len(self._groups.replay.ready()) >= self._groups.gate.batch

    def _take_for_critic(self) -> None:
        """It may be a step ahead of the trainer."""
        critic = self._critic
        if critic is None or not critic.idle or critic.version > min(self._version + 1, self._steps - 1):
            return
        if self._in_turn and self._trains:
            return
        if self._there_is(critic.version) and (step := self._groups.take(critic.version, 0)):
            critic.take(sum(self._made[number].learned for number in step.groups))

    def _take(self) -> None:
        if self._trains or self._version >= self._steps or not self._there_is(self._version):
            return
        if self._in_turn and self._critic and not self._critic.idle:
            return
        if self._colocated and any(rollout.alive and rollout.fetches for rollout in self._rollouts):
            return  # whoever sleeps cannot load a version
        step = self._groups.take(self._version, 0)
        if step is None or (self._critic and self._critic.valued <= self._version):
            return
        made = [self._made[number] for number in step.groups]
        tokens = sum(group.tokens for group in made)
        self._trains = True
        self._sleep("trainer", True)
        self.clock.begins()
        learned = sum(group.learned for group in made)
        seconds = learned * self._costs.train_token_s + self._costs.switch_s * self._colocated
        self._training = self.clock.after_work(seconds, partial(self._trained, made, tokens, seconds))

    def _sleep(self, learner: str, works: bool) -> None:
        """Where the devices of rollouts and reference are a ``learner``'s, they are used by it or by them."""
        before = bool(self._at_work)
        self._at_work = self._at_work | {learner} if works else self._at_work - {learner}
        asleep = bool(self._at_work)
        if self._colocated and asleep != before:
            for rollout in self._rollouts:
                rollout.engine.sleep(asleep)
            for kind, scorer in self._scorers.items():
                if self._sleeps(kind):
                    scorer.sleep(asleep)

    def _sleeps(self, kind: str) -> bool:
        return self._config.run.colocated and is_guest(self._config, kind)

    def _engines_beside(self, kind: str, scorer: int) -> set[int]:
        """Those whose GPUs a scorer that is a guest has: it computes in their place."""
        if self._config.reference.device == "cpu" or self._costs.cores is not None:  # whose cores the clock shares
            return set()
        each = max(1, registry.actors(self._config)["rollout"].gpus(self._config))
        return {e for seat in seats_of(self._config, kind, scorer) if (e := seat // each) < self._config.rollout.count}

    def _beside_engines(self, kind: str, scorer: int, begins: bool) -> None:
        for engine in self._beside[kind][scorer]:
            self._rollouts[engine].engine.hold(begins)

    def _trained(self, made: list[Finished], tokens: int, seconds: float) -> None:
        self.clock.ends()
        self._sleep("trainer", False)
        self._trains, self._training = False, None
        self._train_s += seconds
        held = self._version
        self._tokens += tokens
        self._lags += held * tokens - sum(group.versions for group in made)
        self._lag_max = max(self._lag_max, held - min(group.oldest for group in made))
        self._groups.ledger.commit(held, [group.number for group in made], str(held))
        for group in made:
            del self._made[group.number]
        self._version += 1
        if self._first is None:
            self._first = self.clock.now, self._version
        if self._version % self._config.trainer.checkpoint.every == 0:
            self._saved = self._version
            self._groups.free(self._groups.ledger.covered(self._version))
        for rollout in self._rollouts:
            self._offer(rollout, self._version)
        self._turn()

    # --- versions, and who dies ---------------------------------------------------------------------------------------

    def _offer(self, rollout: Rollout, version: int) -> None:
        """It fetches one version at a time, always the newest."""
        rollout.offered = version
        if rollout.alive and not rollout.fetches:
            rollout.fetches = True
            self.clock.after(self._costs.publish_s, partial(self._fetched, rollout, rollout.deaths, version))

    def _fetched(self, rollout: Rollout, life: int, version: int) -> None:
        if rollout.deaths != life:
            return
        rollout.fetches = False
        self._serve(rollout, version)
        if rollout.offered > version:
            self._offer(rollout, rollout.offered)

    def _serve(self, rollout: Rollout, version: int) -> None:
        """A version has reached a rollout, which may have died meanwhile."""
        if rollout.alive and rollout.member.version < version:
            rollout.engine.swap(version)
            rollout.member.version = version
            self._turn()

    def _mortal(self, lives_s: float | None, dies: Callable[[], None]) -> None:
        if lives_s:
            self.clock.after(float(self._random.exponential(lives_s)), dies)

    def _die(self, rollout: Rollout) -> None:
        self._deaths += 1
        rollout.deaths += 1
        member = rollout.member
        self._groups.leases.holds.release(member.identity)
        del self._of[member.identity]
        rollout.engine.die()
        member.identity = f"{member.name}#{rollout.deaths}"
        member.version, member.credit, member.given = -1, 0, 0
        rollout.alive = rollout.fetches = False
        self._of[member.identity] = rollout
        self.clock.after(self._costs.start_s, partial(self._return, rollout))
        self._turn()

    def _return(self, rollout: Rollout) -> None:
        rollout.member.credit, rollout.alive = rollout.limit, True
        self._offer(rollout, self._version)
        self._mortal(self._costs.rollout_lives_s, partial(self._die, rollout))

    def _trainer_dies(self) -> None:
        """Another one redoes the steps since the checkpoint, with the same groups: nothing is generated again."""
        self._deaths += 1
        redone = (self._version - self._saved) * self._train_s / max(1, self._version)  # as long as they took
        if self._training:
            self.clock.call_off(self._training)
            self.clock.ends()
            self._sleep("trainer", False)
        self._training, self._trains = None, True
        self.clock.after(self._costs.start_s, partial(self._trainer_redoes, redone))

    def _trainer_redoes(self, seconds: float) -> None:
        self._sleep("trainer", True)
        self.clock.begins()
        self.clock.after_work(seconds, partial(self._trainer_returns, seconds))

    def _trainer_returns(self, redone: float) -> None:
        self.clock.ends()
        self._sleep("trainer", False)
        self._redone_s += redone
        self._trains = False
        self._mortal(self._costs.trainer_lives_s, self._trainer_dies)
        self._turn()
