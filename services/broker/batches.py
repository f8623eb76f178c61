"""What learners are given for a step: its groups, read where they are; written down for people, and to the archive."""

from __future__ import annotations

from functools import partial
from typing import Any

import structlog

from penstock.protocols import messages as m
from penstock.protocols.columns import REWARD
from penstock.protocols.experience import ExperienceError
from penstock.protocols.wire import WireError
from penstock.services.broker.archive import open_group
from penstock.services.broker.payloads import PayloadLostError
from penstock.services.broker.rules.ledger import Step
from penstock.services.broker.samples import answers, best_and_worst, by_trajectory, rows
from penstock.services.broker.state import BrokerState
from penstock.services.runtime import health
from penstock.services.runtime.errors import SetupError

log = structlog.get_logger()

SAMPLED_STEPS, FIRST_STEPS = 40, 5
"""Samples are kept of about this many steps, and of the first ones."""


def batch_for(state: BrokerState, step: Step, learner: str) -> m.Batch:
    """What ``learner`` gets for ``step``."""
    batch = _read(state, step)
    if learner != "trainer":
        return batch
    for number in step.groups:
        state.payloads.forget(("train", number))
    _record_samples(state, step.step, batch.groups)
    _show_answers(state, step.step, batch.groups)
    return batch


def free_covered(state: BrokerState) -> bool:
    """Frees what a durable checkpoint covers: one step where it is to be in the archive first, for all of them might
    take longer than anybody waits for the broker. Returns whether there was one: the next turn makes it durable, and
    there may be more. Called where nothing is queued for the store, which reads would not see."""
    groups = state.groups
    covered = groups.ledger.covered(state.covered())
    if not covered:
        return False
    if state.archive.wanted:
        covered = covered[:1]
        _archive(state, covered[0])
    try:
        state.meanwhile.until(state.recorder.sync)
    except OSError as error:  # a full disk: what it may lose is told of by the audit
        log.warning("ledger.jsonl is not on the disk yet", error=str(error))
    groups.free(covered)
    return True


def _archive(state: BrokerState, step: Step) -> None:
    """Writes its groups to disk."""
    health.beat()
    assert step.digest is not None
    try:
        # A run that was resumed may have columns now that it had not when the step was trained.
        batch = _read(state, step, partial=True)
    except PayloadLostError as error:  # known from the trainer alone, after the store had lost it
        log.warning("a step is not in the archive", step=step.step, error=str(error))
        return
    try:
        digest = step.digest
        state.meanwhile.until(lambda: state.archive.append(batch, digest))  # a disk may be slow
    except OSError as error:
        raise SetupError(f"replay.archive: step {step.step} cannot be written: {error}; mend that, and go on") from None


def _read(state: BrokerState, step: Step, partial: bool = False) -> m.Batch:
    late = {column.name for column in state.lacking(step)}
    names = [name for name in state.settings.columns.names if name not in late]
    groups = state.payloads.taken(step.groups, names, partial)
    committed = state.groups.ledger.committed
    return m.Batch(step=step.step, seed=step.seed, max_lag=step.max_lag, groups=groups, committed=committed)


def is_sampled(step: int, steps: int) -> bool:
    """Of a run of so many ``steps`` this one is among some: the first ones, whose answers one wants to see soon, and
    `SAMPLED_STEPS` or a few more over all of it."""
    return step < FIRST_STEPS or step % max(1, steps // SAMPLED_STEPS) == 0


def _record_samples(state: BrokerState, step: int, groups: list[m.TakenGroup]) -> None:
    keep = state.settings.replay.samples
    if not state.recorder.wants_samples(step):
        return
    if keep == "some" and not is_sampled(step, state.steps_to_come):
        return
    kept: list[dict[str, Any]] = []
    pictures: list[bytes] = []
    columns = state.settings.columns
    of_tokens = set(columns.names) - columns.by_trajectory
    for taken in groups[: len(groups) if keep == "all" else 1 if keep == "some" else keep]:
        try:
            group = open_group(taken)
        except (ExperienceError, WireError) as error:  # the trainer leaves it out too
            log.warning("a sample cannot be read", group=taken.number, error=str(error))
            continue
        found = list(rows(step, group, by_trajectory(group, taken.columns, of_tokens)))
        chosen = best_and_worst(found) if keep == "some" else found
        pictures += [each for row in chosen for each in group.trajectories[row["sample"]].pictures]
        kept += chosen
    state.recorder.samples(step, kept, pictures)


def _show_answers(state: BrokerState, step: int, groups: list[m.TakenGroup]) -> None:
    """To trackers, whose thread reads the groups; of a step that is redone they have them already."""
    count = state.settings.tracker_samples
    if not count or step < state.groups.ledger.committed:
        return
    columns = state.settings.columns
    rewards = next((tuple(total.terms) for total in columns.sums if total.name == REWARD), ())
    read = {REWARD, *rewards}  # and none of a teacher's, which are far larger than the answers
    shown = [
        group.model_copy(update={"columns": {name: group.columns[name] for name in read & group.columns.keys()}})
        for group in groups[:count]
    ]
    size = sum(group.experience.nbytes for group in shown)
    state.recorder.answers(step, size, partial(answers, step, shown, rewards, columns.by_token, count))
