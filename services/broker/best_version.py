"""Which version's evaluation was the best, and the end of a run that finds no better one."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import structlog

from penstock.services.broker.rules.course import Best, best_of
from penstock.services.runtime.checkpoint_folders import versions
from penstock.services.runtime.lines import each_line

if TYPE_CHECKING:
    from penstock.services.broker.state import BrokerState

log = structlog.get_logger()

MEASURE = ("function", "name", "weight", "sources", "options", "columns", "whole_group", "last_turn")
"""Of a reward function, what the number follows from."""
NEWER = ("truth_key", "own_words")
"""Keys that count only where they are set: a run of before there were any is to find its measure again."""


def best(state: BrokerState, margin: float = 0.0) -> Best | None:
    """Of the evaluations so far; where they are losses, its score is one with its sign turned."""
    return best_of(_course(state), margin)


def shown(state: BrokerState) -> dict[str, Any] | None:
    """The best one for people: a loss is what it is."""
    found = best(state)
    return found._asdict() | {"score": _as_measured(state, found.score)} if found else None


def worth_keeping(state: BrokerState) -> list[int]:
    """Versions whose checkpoint is the best one, or may become so; by other rewards than there are now, where nothing
    has been evaluated since."""
    found = best_of(each for each in _course(state) or _whole_course(state) if each[0])
    under_way = state.evaluation.round
    return [*([found.step] if found else []), *([under_way.step] if under_way else [])]


def consider_end(state: BrokerState) -> None:
    """Once too many evaluations were no better than the best, no step is taken any more."""
    prompts, found = state.settings.prompts, best(state, state.settings.prompts.stop_margin)
    if not prompts.stop_after or found is None or found.since < prompts.stop_after or state.progress.early:
        return
    measured = f"{_as_measured(state, found.score):.4g}, after step {found.step} (prompts.stop_after)"
    _end(state, f"{found.since} evaluations in a row were no better than {measured}")


def early_end(state: BrokerState) -> dict[str, Any]:
    """Why the run ends early, and by what keys that was found; of one that does not the reason is empty."""
    return {"reason": state.progress.early, "by": _keys(state)}


def take_up(state: BrokerState, row: dict[str, Any]) -> None:
    """What `early_end` said when it was last written down. By the same keys nothing else is found now: what came
    behind an early end may have been better, but the trainer has left."""
    if row.get("by") != _keys(state):
        consider_end(state)
    elif row["reason"]:
        _end(state, row["reason"])


def _as_measured(state: BrokerState, score: float) -> float:
    return -score if _by_loss(state) else score


def _by_loss(state: BrokerState) -> bool:
    prompts = state.settings.prompts
    return prompts.best_by in prompts.eval_given if prompts.best_by else not prompts.evaluates


def measure(state: BrokerState) -> str:
    """What evaluations are measured by, in short."""
    reward = state.settings.described.get("reward") or {}
    counted = []
    for said in reward.get("functions", ()):
        also = {name: weight for name, weight in (said.get("also") or {}).items() if weight}
        if said.get("weight", 1) or also:
            newer = {"also": also} | {key: said.get(key) for key in NEWER}
            counted.append(
                {key: said.get(key) for key in MEASURE} | {k: v for k, v in newer.items() if v not in ({}, None)}
            )
    said = json.dumps([counted, reward.get("columns")], sort_keys=True, default=str)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def remember_measure(state: BrokerState, row: dict[str, Any]) -> None:
    """What was written down of `measure` by the broker before this one."""
    now = measure(state)
    state.progress.measured_since = row.get("measured_since", 0)
    if row.get("measured", now) != now:
        state.progress.measured_since = state.evaluation.made
        log.warning("rewards are other ones: evaluations so far count for no best version", step=row.get("step"))


def recall(state: BrokerState) -> None:
    """Evaluations that the run's files know of and the store does not, up to the newest checkpoint: a run that goes on
    from that in a new store would take the next one for the best, and delete the checkpoint that is."""
    folder = state.settings.folder
    newest = max(versions(folder / "checkpoints"), default=-1)
    for row in each_line(folder / "metrics.jsonl"):
        if row.get("step", 0) > newest:
            continue
        if row.get("kind") == "eval":
            state.evaluation.recall(row)
        elif row.get("kind") == "eval_loss":
            state.losses.note(row["step"], row["sets"], row.get("pairs", {}))


def _course(state: BrokerState) -> list[tuple[int, float]]:
    """Step and score of each evaluation that counts."""
    by = state.settings.prompts.best_by
    return _whole_course(state) if _by_loss(state) else state.evaluation.course(by, state.progress.measured_since)


def _whole_course(state: BrokerState) -> list[tuple[int, float]]:
    of = state.losses if _by_loss(state) else state.evaluation
    return of.course(state.settings.prompts.best_by)


def _keys(state: BrokerState) -> list[Any]:
    prompts = state.settings.prompts
    return [prompts.stop_after, prompts.stop_margin, prompts.best_by]


def _end(state: BrokerState, reason: str) -> None:
    state.progress.early = reason
    log.info("the run ends early", reason=reason)
    state.groups.steps = min(state.groups.steps, max(state.groups.ledger.length, 1))
