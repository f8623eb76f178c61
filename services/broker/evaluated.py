"""What the answers to an evaluation's prompt tell, once every column of theirs is there."""

from __future__ import annotations

import numpy as np
import regex
import structlog

from penstock.protocols.columns import REWARD, SOURCE
from penstock.protocols.experience import ExperienceError, Group, Purpose, Trajectory, mean_by_session, sessions_of
from penstock.protocols.measured import of_answers
from penstock.protocols.packed_groups import unpack_group
from penstock.protocols.wire import WireError
from penstock.services.broker.by_trajectory import by_trajectory
from penstock.services.broker.config import BOXED, EvalSampling
from penstock.services.broker.rules.evaluation import majority, pass_at
from penstock.services.broker.samples import rows
from penstock.services.broker.state import BrokerState
from penstock.services.runtime.boxes import last_boxed

VOTES_BY = 10_000
"""Characters at the end of an answer in which its vote is looked for: many of them are counted in one turn."""
VOTE_S = 0.1
"""What finding an answer's vote may take."""

log = structlog.get_logger()

Key = tuple[Purpose, int]


def finish_evaluation(state: BrokerState, number: int) -> None:
    """The prompt's reward is the mean over the answers that have one; of agents, over sessions."""
    key: Key = ("eval", number)
    entry = state.evaluation.replay.entries[number]
    names = [REWARD, *(name for name in _columns(state, entry.source) if state.payloads.has(key, name))]
    columns = by_trajectory(state, key, names)
    if not np.isfinite(columns[REWARD]).any():
        state.drop_evaluation(number, "no trajectory has a reward")
        return
    group = _group(state, key)
    sessions = sessions_of([t.session for t in group.trajectories]) if group else np.arange(len(columns[REWARD]))
    each = {name: mean_by_session(values, sessions) for name, values in columns.items()}
    how = state.asked_of(entry.draw)
    asked = len(each[REWARD]) == how.n > 1 and how.column in each  # of self-play each branch is an answer of its own
    scores = _several(each, group, sessions, how) if asked else {}
    if group:
        _keep_for_people(state, entry.draw, group, columns)
    state.payloads.forget(key)
    parts = _parts(each, group, sessions)
    if group and group.prompt.source != state.held_out.name_of(entry.draw):
        parts |= _of_source(group.prompt.source, _mean(each[REWARD]), scores)
    state.record_evaluation(state.evaluation.score(number, _mean(each[REWARD]), scores, parts))


def _columns(state: BrokerState, source: str) -> list[str]:
    """What reward functions, and other scorers that are asked in evaluations, say of a trajectory."""
    said = (column for column in state.settings.columns.columns if column.evaluated and column.per != "sampled")
    return [column.name for column in said if column.asked(source)]


def _group(state: BrokerState, key: Key) -> Group | None:
    try:
        return unpack_group(state.payloads.experience(key).data)
    except (ExperienceError, WireError) as error:
        log.warning("an evaluation's answers cannot be read", group=key[1], error=str(error))
        return None


def _parts(each: dict[str, np.ndarray], group: Group | None, sessions: np.ndarray) -> dict[str, float]:
    """By name: the mean of every column, and what the answers are like. ``each`` has a column's values by session."""
    found = {name: _mean(values) for name, values in each.items() if name != REWARD and np.isfinite(values).any()}
    if group is None:
        return found
    answers = group.trajectories
    found["response_tokens"] = float(np.mean([t.sampled for t in answers]))
    found["finished_share"] = float(np.mean([t.finish == "stop" for t in answers]))
    return found | of_answers(answers, sessions.tolist())


def _of_source(source: str, reward: float, scores: dict[str, float]) -> dict[str, float]:
    """The same of one source of a set's prompts, as ``source/gsm8k`` and ``source/gsm8k/pass@4``."""
    if not source:
        return {}
    return {f"{SOURCE}{source}": reward} | {f"{SOURCE}{source}/{name}": value for name, value in scores.items()}


def _mean(values: np.ndarray) -> float:
    return float(values[np.isfinite(values)].mean())


def _several(
    each: dict[str, np.ndarray], group: Group | None, sessions: np.ndarray, how: EvalSampling
) -> dict[str, float]:
    """What several answers tell, by the column that says which of them have passed: ``each`` has it by session. Who has
    no value there has not passed, and is worth 0; of a session that has branches the last one votes."""
    worth = each[how.column]
    found = pass_at(len(worth), int((worth >= how.passes).sum()))
    if group is None:
        return found
    last = dict(zip(sessions.tolist(), group.trajectories, strict=True))
    answers = [_vote(trajectory, how.answer) for trajectory in last.values()]
    return found | {f"maj@{len(answers)}": majority(answers, np.nan_to_num(worth).tolist())}


def _vote(trajectory: Trajectory, pattern: str | None) -> str | None:
    said = trajectory.turns[-1] if trajectory.turns else trajectory.text
    if pattern is None:
        return said.strip()
    if pattern == BOXED:
        return last_boxed(said[-VOTES_BY:])
    try:
        matches = regex.findall(pattern, said[-VOTES_BY:], timeout=VOTE_S)
    except TimeoutError:  # a pattern that goes back and forth over an answer must not hold up the run
        log.warning("an answer's vote took too long", pattern=pattern)
        return None
    return matches[-1] if matches else None


def _keep_for_people(state: BrokerState, draw: int, group: Group, columns: dict[str, np.ndarray]) -> None:
    """The answers to the first prompts of each set."""
    under_way, place = state.evaluation.round, state.held_out.place_of(draw)
    if under_way is None or place >= state.settings.prompts.eval_samples:
        return
    about = {"label": under_way.label, "set": state.held_out.name_of(draw), "row": place}
    found = [about | row for row in rows(under_way.step, group, columns)]
    for row in found:
        del row["group"]  # a lease's number, another one each time
    under_way.answers += found
    state.recorder.keep_pictures(picture for t in group.trajectories for picture in t.pictures)
