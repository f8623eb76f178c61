"""The model being trained: one batch in, one optimizer step, metrics out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from penstock.protocols.columns import (
    BASELINE,
    GIVEN,
    GOOD,
    LAGS,
    PICKED,
    POLICY,
    REFERENCE,
    SAMPLED,
    SQUARES,
    TAUGHT,
    UNDECIDED,
    WEIGHTS,
)
from penstock.protocols.experience import Trajectory, over_session
from penstock.services.learning.batch import TrainingBatch
from penstock.services.learning.constraints import with_known_costs
from penstock.services.learning.layer_norms import LayerNorms
from penstock.services.learning.model_flops import ModelFlops
from penstock.services.learning.model_learner import ModelLearner, mean_metrics, mini_batches
from penstock.services.learning.token_rewards import token_rewards
from penstock.services.modeling.lengths import positions_of
from penstock.services.modeling.packing import Pass, Rows
from penstock.services.modeling.parallel.fsdp import forward, forward_statistics
from penstock.services.modeling.parallel.world import World
from penstock.services.modeling.pinned import to_device
from penstock.services.modeling.routing import Replay
from penstock.services.modeling.taught import Taught
from penstock.services.modeling.token_statistics import Statistic
from penstock.services.runtime import health
from penstock.services.trainer.advantage_columns import advantage_columns
from penstock.services.trainer.algorithms.advantages.online_dpo import preferred
from penstock.services.trainer.algorithms.compose import SUMMED, Algorithm, Part
from penstock.services.trainer.algorithms.totals import Totals
from penstock.services.trainer.by_lag import ByLag
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.described import describe
from penstock.services.trainer.entropy_control import bonus_of_update, steer
from penstock.services.trainer.judgements import Judgements
from penstock.services.trainer.mismatch import Mismatch
from penstock.services.trainer.router_balance import RouterBalance
from penstock.services.trainer.running_baseline import KEPT
from penstock.services.trainer.sampled_entropy import sampled_entropy
from penstock.services.trainer.self_teacher import SelfTeacher
from penstock.services.trainer.subset import subset_of
from penstock.services.trainer.undecided import most_undecided
from penstock.services.trainer.weight_average import WeightAverage


class Learner(ModelLearner):
    """The policy: a `ModelLearner` with an algorithm, and a ``teacher`` where that is the policy itself."""

    def __init__(
        self, model: Any, config: TrainerConfig, temperature: float, world: World | None = None,
        teacher: SelfTeacher | None = None, frozen_steps: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(model, config, config.counted_steps, world, frozen_steps)
        self._config, self._teacher = config, teacher
        self._temperature, self._compares = temperature, config.algorithm.equal_is_idle
        self.algorithm = Algorithm(config.algorithm)
        self._balance = RouterBalance(model, config.algorithm.router_balance > 0)
        if not config.freeze:  # of which a backward takes less
            self.flops = ModelFlops.of(self.config, self.adapted is not None, self.world)
        rate = teacher.config.teacher_rate if teacher else 1.0
        self.average = WeightAverage(self.parameters, self.optimizer, rate) if rate < 1 else None
        """The teacher's weights, where they are not the policy's."""

    def train(
        self,
        step: TrainingBatch,
        before_update: Callable[[], None] = lambda: None,
        judgements: Judgements | None = None,
    ) -> dict[str, float]:
        """The updates of ``step``, one unless the config says more; the model then is `version` + 1. ``before_update``
        is called once the first gradient is there, before a parameter changes. ``judgements`` are told of every token,
        once. Returns the step's metrics, means over the updates."""
        self.flops.begin()
        step = with_known_costs(step, self._config.algorithm.constraints)
        if self.average:
            self.average.begin()
            before_update()  # the parameters are the teacher's for a while
        (advantages, rewarded), proximal = self._advantages(step), None
        parts = list(mini_batches(step, self._config.epochs, self._config.mini_batches))
        if len(parts) > 1 and self._config.algorithm.needs_proximal:
            proximal = self.evaluate(step, lambda rows: forward(self.model, rows, self._temperature))
        watched = self._config.norms_every and (self.version + 1) % self._config.norms_every == 0
        norms = LayerNorms(self.parameters, self.world) if watched else None
        given, updates = self._config.algorithm.given, []
        described = describe(step, self.version, self._compares, given.compared)
        self.algorithm.given_coefficient = given.at(self.version)
        state = self.penalties_of_step(self._frozen_steps)
        for number, rows in enumerate(parts):
            rate, bonus = self.begin_update(), bonus_of_update(self._config.algorithm, state)
            self.algorithm.entropy_bonus = bonus
            with self.memory.of("memory/backward"):
                loss, metrics = self.gradient(
                    partial(self.accumulate, step, rows, advantages, proximal, judgements, number == 0)
                )
            with self.memory.of("memory/update"):
                ended = self.end_update(loss, before_update if number == 0 else lambda: None, norms)
            steer(self._config.algorithm, state, metrics)
            steered = {"entropy_bonus": bonus} if self._config.algorithm.entropy_control else {}
            steered |= {"given_coefficient": self.algorithm.given_coefficient} if given.decay_steps else {}
            updates.append(metrics | ended | steered | {"loss": loss, "lr": rate})
            if number + 1 == self._config.mini_batches:
                judgements = None
        if self.average:
            self.average.follow()
        self.version += 1
        replay: Replay | None = getattr(self.model, "penstock_replay", None)
        routed = replay.take_metrics(self.world) if replay else {}
        return mean_metrics(updates) | rewarded | described | routed

    def accumulate(
        self,
        step: TrainingBatch,
        rows: np.ndarray | None = None,
        advantages: torch.Tensor | None = None,
        proximal: list[np.ndarray] | None = None,
        judgements: Judgements | None = None,
        first: bool = True,
    ) -> tuple[float, dict[str, float]]:
        """Adds the gradient of these ``rows`` of the step (default: all) to the parameters, a micro-batch at a time.
        The result does not depend on how they are cut, up to rounding. ``advantages`` are of all the step's rows;
        ``proximal`` the log-probabilities that the policy had when the step began, ``[tokens]`` each, where it has
        changed since; without them only the ``first`` update sees that policy, and says how far it is from those that
        sampled. Returns the loss and metrics."""
        advantages = self._advantages(step)[0] if advantages is None else advantages
        learned = self._learned(step)
        chosen = np.flatnonzero(learned) if rows is None else rows[learned[rows]]
        trajectories = [step.trajectories[i] for i in chosen]
        before = None if proximal is None else [proximal[i] for i in chosen]
        behaviour = [t.logprobs for t in trajectories]
        token_values = {name: [values[i] for i in chosen] for name, values in step.token_values.items()}
        given, sizes = step.given[chosen], np.array([t.sampled for t in trajectories], np.int64)
        sampled = np.where(given, 0, sizes)
        values, good = self._values(step, chosen, sizes if self._config.algorithm.given.as_sampled else sampled)
        tops = {name: [step.tops[name][i] for i in chosen] for name in self.algorithm.teachers}
        answers, teaches_given = np.where(given, sizes, 0), self._config.algorithm.given.shape == "distill"
        totals = Totals.of(sampled, answers, step.sessions[chosen], good, tops.values(), teaches_given)
        whole = to_device(torch.from_numpy(over_session(sampled, step.sessions[chosen])), self.device)
        if not totals.tokens and not totals.given:
            return 0.0, {}
        if self._config.algorithm.picks_tokens:
            token_values |= self._picked(step, chosen, advantages, before)
        lags = [self._lags(trajectory) for trajectory in trajectories]
        if LAGS in self.algorithm.columns:
            token_values[LAGS] = lags
        plan = self.plan(trajectories, step.groups[chosen])

        def parts() -> Iterator[tuple[Rows, Part]]:
            for each, _ in plan:
                health.beat()
                rows = each.rows()
                stated = self._stated(each, rows, trajectories, tops)
                log_prob = stated.pop("log_prob")
                members, index = list(rows.index), to_device(torch.tensor(rows.index), self.device)
                columns = {
                    name: rows.column(token_values[name]) if name in token_values else values[name][index][:, None]
                    for name in self.algorithm.columns
                }
                sampled_as = rows.column(behaviour)
                if not self.world.last_stage:  # zeros with a backward: the loss, which does not count, is finite
                    log_prob = log_prob + sampled_as
                advantage = to_device(advantages[chosen[members], 1 : log_prob.shape[1] + 1], self.device)
                old = None if before is None else rows.column(before)
                shown = to_device(torch.from_numpy(given[members])[:, None], self.device) if totals.given else None
                mask, shown = (rows.mask, None) if shown is None else (rows.mask & ~shown, rows.mask & shown)
                stated |= {"given": shown, "sampled": bool(sampled[members].any()), "tokens": whole[index]}
                yield rows, Part(log_prob, sampled_as, advantage, mask, columns, old, **stated)

        def judged(rows: Rows, part: Part) -> None:
            if judgements:
                judgements.note(chosen[list(rows.index)], part)

        return self._backward(plan, parts, totals, lags, judged, first or before is not None)

    def _values(
        self, step: TrainingBatch, chosen: np.ndarray, sizes: np.ndarray
    ) -> tuple[dict[str, torch.Tensor], float]:
        """Columns of a number for each ``chosen`` trajectory, where it is computed; and how many tokens are of good
        ones, which may be imitated in so many each (``sizes``)."""
        found, good = {name: values[chosen] for name, values in step.values.items()}, 0.0
        if GOOD in self.algorithm.columns:
            found[GOOD] = (step.rewards[chosen] >= self._config.algorithm.imitate.above).astype(np.float32)
            good = float(found[GOOD] @ sizes)
        return {name: to_device(torch.from_numpy(values), self.device) for name, values in found.items()}, good

    def _stated(
        self, each: Pass, rows: Rows, trajectories: list[Trajectory],
        tops: dict[str, list[tuple[np.ndarray, np.ndarray]]],
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """What the algorithm wants to know of each token, and of routers, by the names that a `Part` has for it.
        ``rows`` are those of ``each``; ``tops``: what each of its teachers says of their ``trajectories``."""
        wanted: list[Statistic] = ["log_prob"]
        if self.algorithm.wants_entropy:
            wanted.append("entropy")
        if tops:
            wanted.append("divergence")
            said = [([of[i] for i in rows.index], self.algorithm.teachers[name]) for name, of in tops.items()]
            members = [trajectories[i] for i in rows.index]
            rows = replace(rows, taught=Taught.of(members, said, self.algorithm.compare, self.device))
        with self.keeping(), self._balance.noting(each, rows) as noted:
            found = forward_statistics(self.model, rows, self._temperature, tuple(wanted))
        return dict(zip(wanted, found, strict=True)) | noted

    def _backward(
        self,
        plan: list[tuple[Pass, float]],
        parts: Callable[[], Iterator[tuple[Rows, Part]]],
        totals: Totals,
        lags: list[np.ndarray],
        judged: Callable[[Rows, Part], None],
        compared: bool,
    ) -> tuple[float, dict[str, float]]:
        counts, compared = [count for _, count in plan], compared and totals.tokens > 0
        first_pass = self.algorithm.needs_first_pass and totals.tokens > 0
        self._balance.count(self.model, plan, self._temperature, self.world)
        mean_weight = self._mean_weight((part for _, part in parts()), counts) if first_pass else 1.0
        # On the device until the end: a number that is asked for would have to be waited for.
        total, sums = torch.zeros((), dtype=torch.float64, device=self.device), dict[str, torch.Tensor]()
        oldest = max((int(each.max(initial=0)) for each in lags), default=0)
        mismatch, by_lag = Mismatch(), ByLag(oldest, self.algorithm.clips_tokens)
        for turn, (counts_once, (rows, part)) in enumerate(zip(counts, self.early(parts()), strict=True), 1):
            loss, found = self.algorithm.loss(part, totals, mean_weight)
            self.sum_gradients(turn == len(plan))
            self.algorithm.backward(loss * (counts_once * self.loss_scale.value))
            if counts_once:
                total += loss.detach()
                judged(rows, part)
            if counts_once and compared:
                age = rows.column(lags)
                mismatch.add(part.policy, part.behaviour, part.mask, age == 0)
                by_lag.add(part.policy, part.behaviour, age, part.mask, self.algorithm.clipped(part))
            if part.entropy is None and totals.tokens:  # an estimate, from the sampled tokens alone
                found["entropy"] = sampled_entropy(part.log_prob.detach(), part.behaviour, part.mask)
            for name, mean in found.items():
                of_step = sums.setdefault(name, torch.zeros_like(total))
                if counts_once:  # what does not may be NaN
                    mean = torch.as_tensor(mean).detach().reshape(())
                    of_step += mean * (1.0 if name in SUMMED else part.mask.sum() / totals.tokens)
        for _ in range(1 + first_pass + self._balance.asked):
            self.flops.forward()
        self.flops.backward()
        mine, *means = torch.stack([total, *sums.values()]).tolist()
        (whole,) = self.world.sum([mine])
        found = self.algorithm.finished(self.world.sum_named(dict(zip(sums, means, strict=True))))
        return whole, found | (mismatch.metrics(self.world) | by_lag.metrics(self.world) if compared else {})

    def _held(self) -> Iterator[torch.Tensor]:
        """See `ModelLearner._held`."""
        yield from super()._held()
        if self.average:
            yield from self.average.first

    def _learned(self, step: TrainingBatch) -> np.ndarray:
        """bool ``[trajectories]``: those that the policy learns from, given ones whatever their reward, unless they are
        weighed by it."""
        learned = step.rewarded & self._compared(step)
        if self._config.algorithm.truncated == "mask":
            learned = learned & np.array([t.finish != "length" for t in step.trajectories], bool)
        return learned if self._config.algorithm.given.weighed else learned | step.given

    def _compared(self, step: TrainingBatch) -> np.ndarray:
        """bool ``[trajectories]``: those that are not left out of their group."""
        subset = self._config.algorithm.subset
        return subset_of(step, subset) if subset else np.ones(len(step.trajectories), bool)

    def _advantages(self, step: TrainingBatch) -> tuple[torch.Tensor, dict[str, float]]:
        """float32 ``[trajectories, longest]`` on the host, by token, 0 of trajectories without a reward; metrics."""
        compared = step.rewarded if self._config.algorithm.given.compared else step.rewarded & ~step.given
        rewarded = np.flatnonzero(compared)
        if not rewarded.size:  # every call of a reward function failed: nothing is learned, and nobody dies
            return torch.zeros((len(step.trajectories), max((len(t.tokens) for t in step.trajectories), default=0))), {}
        state = self.penalties_of_step(self._frozen_steps)
        rewards = token_rewards(step, rewarded, self._config.algorithm.penalties, state)
        metrics = rewards.metrics
        if self._config.algorithm.subset:  # the penalties' state goes by all that was sampled
            kept = np.flatnonzero(self._compared(step)[rewarded])
            rewarded = rewarded[kept]
            rewards = rewards.of(kept, max(len(step.trajectories[i].tokens) for i in rewarded))
        columns = advantage_columns(step, rewarded, self._config.algorithm, rewards, state)
        if BASELINE in self.algorithm.given:
            metrics |= {name: value for name, value in state.items() if name.startswith(KEPT)}
        groups, sessions = torch.from_numpy(step.groups[rewarded]), torch.from_numpy(step.sessions[rewarded])
        mask = rewards.mask.bool()
        if self._config.algorithm.weighs_policy:
            policy_columns, taught = self._policy_columns(step, rewarded, mask, columns[SAMPLED])
            columns, metrics = columns | policy_columns, metrics | taught
        if self._config.algorithm.advantage.type == "online_dpo":
            metrics |= preferred(mask, groups, columns[REFERENCE], columns[POLICY], rewards.scores, sessions)
        if self._config.algorithm.teacher_advantage:
            metrics["teacher_kl"] = self.algorithm.teacher_kl(columns, mask)
        weighed = self._learned(step) & ~(step.given & (not self._config.algorithm.given.weighed))
        advantage, learned = self._config.algorithm.advantage, weighed[rewarded]
        compares = advantage.compares and advantage.type != "custom"
        alone = step.left_alone(rewarded) if compares else None
        compared_as = rewards.scores, mask, groups, columns, rewards.tokens, sessions
        worth = self.algorithm.advantages(*compared_as, learned, alone).float()
        found = torch.zeros((len(step.trajectories), max(len(t.tokens) for t in step.trajectories)))
        found[rewarded, : mask.shape[1]] = worth
        return found, metrics

    def _policy_columns(
        self, step: TrainingBatch, chosen: np.ndarray, mask: torch.Tensor, sampled: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """What the present policy says of the ``chosen`` trajectories' tokens, and the correction's weights; of these,
        what the advantage is given. And metrics."""
        if TAUGHT in self.algorithm.given:
            return self._taught_columns(step, chosen)

        def compute(rows: Rows) -> torch.Tensor:
            return forward_statistics(self.model, rows, self._temperature, ("log_prob", "squares"))

        found = self.evaluate(step, compute)
        policy, squares = (step.padded([of[which] for of in found], chosen) for which in (0, 1))
        wanted = {name: step.column(name, chosen) for name in self.algorithm.columns if name not in GIVEN}
        read = {name: values if values.ndim > 1 else values[:, None] for name, values in wanted.items()}
        if LAGS in self.algorithm.columns:
            read[LAGS] = step.padded([self._lags(trajectory) for trajectory in step.trajectories], chosen)
        weights, _ = self.algorithm.weights(Part(policy, sampled, torch.zeros_like(policy), mask, read))
        weights = torch.ones_like(policy) if weights is None else weights
        return {POLICY: policy, SQUARES: squares, WEIGHTS: weights}, {}

    def _taught_columns(
        self, step: TrainingBatch, chosen: np.ndarray
    ) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """What the present policy says as it is asked, and once it has seen a good answer."""
        assert self._teacher is not None, "advantage=self_distillation shows good answers by its teacher"

        def evaluate(step: TrainingBatch) -> list[np.ndarray]:
            return self.evaluate(step, lambda rows: forward(self.model, rows, self._temperature))

        def as_teacher(step: TrainingBatch) -> list[np.ndarray]:
            with self.average.in_place() if self.average else nullcontext():
                return evaluate(step)

        policy, room = evaluate(step), positions_of(self.model.config)
        taught, metrics = self._teacher.taught(step, policy, room, as_teacher)
        return {POLICY: step.padded(policy, chosen), TAUGHT: step.padded(taught, chosen)}, metrics

    def _picked(
        self, step: TrainingBatch, chosen: np.ndarray, advantages: torch.Tensor, before: list[np.ndarray] | None
    ) -> dict[str, list[np.ndarray]]:
        """`PICKED` and `UNDECIDED`, as far as the algorithm wants them, float32 ``[tokens]`` for each ``chosen``
        trajectory: 1 for tokens that are told from the others, out of all of them."""
        update = replace(step, trajectories=[step.trajectories[i] for i in chosen], groups=step.groups[chosen])
        masks = [t.loss_mask * (not t.given) for t in update.trajectories]  # given ones were nobody's choice
        share = self.algorithm.entropy_share
        wanted: tuple[Statistic, ...] = ("log_prob", "entropy") if share < 1 else ("log_prob",)
        stated = self.evaluate(update, lambda rows: forward_statistics(self.model, rows, self._temperature, wanted))
        now, *entropies = ([of[which] for of in stated] for which in range(len(wanted)))
        found = {UNDECIDED: most_undecided(entropies[0], masks, share)} if share < 1 else {}
        if self.algorithm.picks:
            every, seed = range(len(chosen)), int(step.groups[chosen[0]])
            old = update.padded(self._denominators(update.trajectories, before, now), every)
            log_prob, mask = update.padded(now, every), update.padded(masks, every).bool()
            picked = self.algorithm.pick(log_prob, old, advantages[chosen, : mask.shape[1]], mask, seed)
            found[PICKED] = [picked[row, : len(values)].numpy().astype(np.float32) for row, values in enumerate(now)]
        return found

    def _denominators(
        self, trajectories: list[Trajectory], before: list[np.ndarray] | None, now: list[np.ndarray]
    ) -> list[np.ndarray]:
        """What the loss's ratio divides by, float32 ``[tokens]`` of each: see `Algorithm.denominator`."""
        ratio, behaviour = self._config.algorithm.ratio, [t.logprobs for t in trajectories]
        if ratio == "behaviour":
            return behaviour
        if ratio == "proximal":
            return before or now
        shares = [lags / (lags + 1) for lags in map(self._lags, trajectories)]
        return [b + s * (n - b) for b, s, n in zip(behaviour, shares, now, strict=True)]

    def _lags(self, trajectory: Trajectory) -> np.ndarray:
        """float32 ``[tokens]``: how many versions ago each was sampled, 0 where it was not."""
        sampled = (trajectory.loss_mask == 1) & (not trajectory.given)
        return np.where(sampled, self.version - trajectory.versions, 0).astype(np.float32)

    @torch.no_grad()
    def _mean_weight(self, parts: Iterator[Part], counts: list[float]) -> float:
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for part, counts_once in zip(parts, counts, strict=True):
            terms = self.algorithm.mean_terms(part)
            if counts_once:
                sums += torch.stack([term.double() for term in terms])
        total, count = self.world.sum(sums.tolist())
        return total / count if total else 1.0  # all 0: so they stay
