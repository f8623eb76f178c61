"""What an answered column does to its group: one step nearer to ready, or dropped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import regex
import structlog

from penstock.protocols.columns import REWARD, Column, WeightedSum
from penstock.protocols.experience import ExperienceError, Purpose, Trajectory, mean_by_session, sessions_of
from penstock.protocols.messages import Score
from penstock.protocols.packed_groups import failures_of, lengths_of, sessions_in, unpack_group
from penstock.protocols.wire import WireError
from penstock.services.broker.rules.evaluation import majority, pass_at
from penstock.services.broker.rules.filtering import why_filtered
from penstock.services.broker.rules.replay_buffer import Replay
from penstock.services.broker.state import BrokerState
from penstock.services.broker.tally import Tally

VOTES_BY = 10_000
"""Characters at the end of an answer in which its vote is looked for: many of them are counted in one turn."""
VOTE_S = 0.1
"""What finding an answer's vote may take."""

log = structlog.get_logger()

LEAST_VALUES = 2
"""A group in which fewer trajectories have a reward teaches nothing."""


def take_score(state: BrokerState, column: Column, score: Score) -> None:
    """Applies one score, once. Raises `ColumnError` where its values are not the column's."""
    replay = replay_of(state, score.purpose)
    entry = replay.wants(score.number, column.name)
    if entry is None:
        return  # repeated, or for a group that is gone
    if score.unusable:
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
    if score.purpose == "train" and column.name in _looked_at(state):
        _filter(state, score.number)
    if entry.needs or score.number not in replay.entries:
        return
    if score.purpose == "train":
        state.groups.keep()
    else:
        _finish_evaluation(state, score.number)


def unjudged(source: str) -> str:
    """Why a prompt of this source cannot have a reward."""
    return f"no reward function with a weight is asked for the source {source!r} (reward.functions.N.sources)"


def replay_of(state: BrokerState, purpose: Purpose) -> Replay:
    """The finished groups of a purpose."""
    return state.groups.replay if purpose == "train" else state.evaluation.replay


def complete(state: BrokerState) -> None:
    """Groups of a run that is resumed, and needs fewer columns than it did, may lack nothing but their sums. Those for
    which there are too few answers now are dropped."""
    for number, entry in list(state.groups.replay.entries.items()):
        if entry.trajectories < state.settings.sampling.trajectories:
            state.payloads.forget(("train", number))
            reason = f"{entry.trajectories} answers were made, and more are asked for now"
            state.groups.without_failure(number, reason, "too_old")
    for number, entry in list(state.groups.replay.entries.items()):
        for total in state.settings.columns.trained_sums:
            here = number in state.groups.replay.entries and not total.terms.keys() & entry.needs
            if here and not state.payloads.has(("train", number), total.name):
                _add_sum(state, "train", number, total, [])
                _filter(state, number)


def _add_sum(state: BrokerState, purpose: Purpose, number: int, total: WeightedSum, errors: Sequence[str]) -> None:
    """All its terms are there now, of those that the group's source is asked for."""
    key, source = (purpose, number), replay_of(state, purpose).entries[number].source
    if not state.settings.columns.judged(source, purpose == "eval"):  # of a run that is resumed, and asks others now
        state.drop_any(purpose, number, unjudged(source), "prompt")
        return
    terms = _by_trajectory(state, key, state.settings.columns.asked_terms(total, source))
    values = total.of(terms)
    if total.name == REWARD and not any(state.settings.columns.by_name[name].nullable for name in terms):
        failures = failures_of(state.payloads.experience(key))  # which only reward functions know of
        values[[bool(failure) for failure in failures]] = np.nan
        errors = [*errors, *filter(None, failures)]
    state.payloads.add(key, total.name, values)
    if purpose == "train" and total.name == REWARD:
        _judge(state, number, values, errors)


def _by_trajectory(state: BrokerState, key: tuple[Purpose, int], names: list[str]) -> dict[str, np.ndarray]:
    """``[trajectories]`` of each of these columns: of one with a value for each token, the sums."""
    found = state.payloads.columns(key, names)
    if of_tokens := state.settings.columns.by_token.intersection(found):
        ends = np.cumsum(lengths_of(state.payloads.experience(key)))
        found |= {name: np.array([part.sum() for part in np.split(found[name], ends[:-1])]) for name in of_tokens}
    return found


def _judge(state: BrokerState, number: int, rewards: np.ndarray, errors: Sequence[str]) -> None:
    """Groups of which too few answers have a reward make room for others."""
    rewards = _by_session(state, number, rewards)
    found = int(np.isfinite(rewards).sum())
    if found:
        state.curriculum.measured(state.groups.replay.entries[number].draw, float(np.nanmean(rewards)))
    if found < min(LEAST_VALUES, len(rewards)):
        why = errors[-1] if errors else _without_number(state, number)
        state.drop(number, f"too few trajectories have a reward; {why}", "reward")


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
    return {term for name in (rule.column, REWARD) for term in sums.get(name, {name: 1.0})}


def _filter(state: BrokerState, number: int) -> None:
    """Once all that it looks at is there, groups that `replay.filter` leaves out make room for others; one whose source
    has no such column is kept. Answers without a reward are not learned from, and have no part; but in a rule of the
    user's own, which may say what it says of any answer."""
    rule, entry = state.settings.replay.filter, state.groups.replay.entries.get(number)
    if rule.type == "none" or entry is None or _looked_at(state) & entry.needs:
        return
    column = state.settings.columns.by_name.get(rule.column)
    if column and not column.asked(entry.source):
        return
    found = _by_trajectory(state, ("train", number), list({rule.column, REWARD}))
    values = found[rule.column]
    if rule.type != "column":
        values = _by_session(state, number, np.where(np.isfinite(found[REWARD]), values, np.float32(np.nan)))
    if verdict := why_filtered(rule, values):
        state.payloads.forget(("train", number))
        state.groups.filter(number, verdict)


def _finish_evaluation(state: BrokerState, number: int) -> None:
    """Its reward is the mean over the trajectories that have one; over sessions, of agents."""
    rewards = state.payloads.columns(("eval", number), [REWARD])[REWARD]
    usable = rewards[np.isfinite(rewards)]
    if not usable.size:
        state.drop_evaluation(number, "no trajectory has a reward")
        return
    scores: dict[str, float] = {}
    if len(rewards) > 1:
        scores, rewards = _several(state, number, rewards)
        usable = rewards[np.isfinite(rewards)]
    state.payloads.forget(("eval", number))
    state.record_evaluation(state.evaluation.score(number, float(usable.mean()), scores))


def _several(state: BrokerState, number: int, rewards: np.ndarray) -> tuple[dict[str, float], np.ndarray]:
    """What several answers to an evaluation prompt tell, and the reward of each: of an agent's session, where it has
    branches, their mean, and its vote is the last one's. Who has no reward has not passed, and is worth 0."""
    how = state.asked_of(state.evaluation.replay.entries[number].draw)
    try:
        group = unpack_group(state.payloads.experience(("eval", number)).data)
    except (ExperienceError, WireError) as error:
        log.warning("an evaluation's answers cannot be read", group=number, error=str(error))
        return pass_at(len(rewards), int((rewards >= how.passes).sum())), rewards
    sessions = sessions_of([t.session for t in group.trajectories])
    rewards = mean_by_session(rewards, sessions)
    if len(rewards) == 1:
        return {}, rewards
    last = dict(zip(sessions.tolist(), group.trajectories, strict=True))
    answers = [_vote(trajectory, how.answer) for trajectory in last.values()]
    found = pass_at(len(rewards), int((rewards >= how.passes).sum()))
    return found | {f"maj@{len(answers)}": majority(answers, np.nan_to_num(rewards).tolist())}, rewards


def _vote(trajectory: Trajectory, pattern: str | None) -> str | None:
    said = trajectory.turns[-1] if trajectory.turns else trajectory.text
    if pattern is None:
        return said.strip()
    try:
        matches = regex.findall(pattern, said[-VOTES_BY:], timeout=VOTE_S)
    except TimeoutError:  # a pattern that goes back and forth over an answer must not hold up the run
        log.warning("an answer's vote took too long", pattern=pattern)
        return None
    return matches[-1] if matches else None
