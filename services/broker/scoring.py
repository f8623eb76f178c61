"""What an answered column does to its group: one step nearer to ready, or dropped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.protocols.columns import REWARD, Column, WeightedSum
from penstock.protocols.experience import Purpose, mean_by_session, sessions_of
from penstock.protocols.messages import Score
from penstock.protocols.packed_groups import failures_of, sessions_in
from penstock.services.broker.by_trajectory import by_trajectory
from penstock.services.broker.evaluated import finish_evaluation
from penstock.services.broker.rules.filtering import why_filtered
from penstock.services.broker.rules.replay_buffer import Replay
from penstock.services.broker.state import BrokerState
from penstock.services.broker.tally import Tally

LEAST_VALUES = 2
"""A group in which fewer trajectories have a reward teaches nothing."""


def take_score(state: BrokerState, column: Column, score: Score, by: str) -> None:
    """Applies one score, once, that ``by`` has made. Raises `ColumnError` where its values are not the column's."""
    replay = replay_of(state, score.purpose)
    entry = replay.wants(score.number, column.name)
    if entry is None:
        return  # repeated, or for a group that is gone
    if score.unusable:
        if replay.refuse(entry, column.name, by, state.settings.broker.max_attempts):
            state.drop_any(score.purpose, score.number, score.unusable, "unusable")
        return
    column.check(score.values, entry.trajectories, entry.tokens)
    if column.nullable:
        state.progress.tallies.setdefault(column.name, Tally()).add(entry.trajectories, score.errors)
    state.progress.latency.add(column.name, score.seconds)
    key = (score.purpose, score.number)
    state.payloads.add(key, column.name, score.values)
    if score.purpose == "train":
        state.traces.scored(score.number, column.name, score.seconds)
        state.groups.scored(score.number, column.name)
    else:
        replay.scored(score.number, column.name)
    for total in state.settings.columns.sums:
        here = score.number in replay.entries
        if here and column.name in total.terms and not (total.terms.keys() & entry.needs):
            _add_sum(state, score.purpose, score.number, total, score.errors)
    if score.purpose == "train" and column.name == _measured_by(state):
        _measure(state, score.number)
    if score.purpose == "train" and column.name in _looked_at(state):
        _filter(state, score.number)
    if entry.needs or score.number not in replay.entries:
        return
    if score.purpose == "train":
        state.groups.keep()
    else:
        finish_evaluation(state, score.number)


def unjudged(source: str) -> str:
    """Why a prompt of this source cannot have a reward."""
    return f"no reward function with a weight is asked for the source {source!r} (reward.functions.N.sources)"


def replay_of(state: BrokerState, purpose: Purpose) -> Replay:
    """The finished groups of a purpose."""
    return state.groups.replay if purpose == "train" else state.evaluation.replay


def complete(state: BrokerState) -> None:
    """Groups of a run that is resumed, and needs fewer columns than it did, may lack nothing but their sums. Those for
    which there are too few answers now are dropped."""
    replay = state.groups.replay
    for number, entry in list(replay.entries.items()):
        if entry.trajectories < state.settings.sampling.trajectories:
            state.payloads.forget(("train", number))
            reason = f"{entry.trajectories} answers were made, and more are asked for now"
            state.groups.without_failure(number, reason)
    for total in state.settings.columns.trained_sums:
        summed = [number for number, entry in replay.entries.items() if not total.terms.keys() & entry.needs]
        for number in state.payloads.lacking(summed, total.name):
            if number in replay.entries:
                _add_sum(state, "train", number, total, [])
                _filter(state, number)


def _add_sum(state: BrokerState, purpose: Purpose, number: int, total: WeightedSum, errors: Sequence[str]) -> None:
    """All its terms are there now, of those that the group's source is asked for."""
    key, source = (purpose, number), replay_of(state, purpose).entries[number].source
    if not state.settings.columns.judged(source, purpose == "eval"):  # of a run that is resumed, and asks others now
        state.drop_any(purpose, number, unjudged(source), "prompt")
        return
    terms = by_trajectory(state, key, state.settings.columns.asked_terms(total, source))
    values = total.of(terms)
    if total.name == REWARD and not any(state.settings.columns.by_name[name].nullable for name in terms):
        failures = failures_of(state.payloads.experience(key))  # which only reward functions know of
        values[[bool(failure) for failure in failures]] = np.nan
        errors = [*errors, *filter(None, failures)]
    state.payloads.add(key, total.name, values)
    if purpose == "train" and total.name == REWARD:
        _judge(state, number, values, errors)


def _judge(state: BrokerState, number: int, rewards: np.ndarray, errors: Sequence[str]) -> None:
    """Groups of which too few answers have a reward make room for others."""
    _measure(state, number)
    rewards = _by_session(state, number, rewards)
    found = int(np.isfinite(rewards).sum())
    if found < min(LEAST_VALUES, len(rewards)):
        why = errors[-1] if errors else _without_number(state, number)
        state.drop(number, f"too few trajectories have a reward; {why}", "reward")


def _measure(state: BrokerState, number: int) -> None:
    """Once its column is there, and what says which answers have a reward, the curriculum hears of a group; of one
    whose source is not asked for it, never."""
    column, entry = _measured_by(state), state.groups.replay.entries.get(number)
    if column and entry and all(state.payloads.has(("train", number), name) for name in (column, REWARD)):
        values = _of_rewarded(state, number, column)
        if np.isfinite(values).any():
            state.curriculum.measured(entry.draw, float(np.nanmean(values, dtype=np.float64)))


def _measured_by(state: BrokerState) -> str | None:
    """The curriculum's column, where there is one."""
    rests = state.settings.prompts.curriculum
    return rests.column if rests else None


def _of_rewarded(state: BrokerState, number: int, column: str) -> np.ndarray:
    """``[sessions]`` of the column, NaN of answers without a reward: these are not learned from."""
    found = by_trajectory(state, ("train", number), list({column, REWARD}))
    return _by_session(state, number, np.where(np.isfinite(found[REWARD]), found[column], np.float32(np.nan)))


def _without_number(state: BrokerState, number: int) -> str:
    """Which of the reward's columns have none for some answer: what they said of it came with them, before the last."""
    total = next(each for each in state.settings.columns.sums if each.name == REWARD)
    asked = state.settings.columns.asked_terms(total, state.groups.replay.entries[number].source)
    found = state.payloads.columns(("train", number), asked)
    lacking = [name for name, values in found.items() if not np.isfinite(values).all()]
    return f"{', '.join(lacking) or REWARD} gave no number for some of them; logs/reward-*.jsonl has why"


def _by_session(state: BrokerState, number: int, values: np.ndarray) -> np.ndarray:
    """``[sessions]`` of a training group's ``[trajectories]``: an agent's session counts once, by its mean."""
    if len(values) <= state.settings.sampling.trajectories:
        return values
    return mean_by_session(values, sessions_of(sessions_in(state.payloads.experience(("train", number)))))


def _looked_at(state: BrokerState) -> set[str]:
    """Columns that `replay.filter` waits for: its own, and what says which answers have a reward."""
    rule, sums = state.settings.replay.filter, {total.name: total.terms for total in state.settings.columns.sums}
    if rule.type == "none":
        return set()
    names = [rule.column, REWARD, *filter(None, [_measured_by(state)])]  # what is dropped is measured before
    return {term for name in names for term in sums.get(name, {name: 1.0})}


def _filter(state: BrokerState, number: int) -> None:
    """Once all that it looks at is there, groups that `replay.filter` leaves out make room for others; one whose source
    has no such column is kept. A rule of the user's own may say what it says of any answer, also without a reward."""
    rule, entry = state.settings.replay.filter, state.groups.replay.entries.get(number)
    if rule.type == "none" or entry is None or _looked_at(state) & entry.needs:
        return
    column = state.settings.columns.by_name.get(rule.column)
    if column and not column.asked(entry.source):
        return
    if rule.type == "column":
        values = by_trajectory(state, ("train", number), [rule.column])[rule.column]
    else:
        values = _of_rewarded(state, number, rule.column)
    if verdict := why_filtered(rule, values):
        state.payloads.forget(("train", number))
        state.groups.filter(number, verdict)
