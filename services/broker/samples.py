"""Trajectories for people: a flat row each, as samples.jsonl and `penstock rollouts` have them, or trackers' tables."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, zip_longest
from typing import Any

import numpy as np
import structlog

from penstock.protocols.columns import AGENT, REWARD
from penstock.protocols.experience import ALONE, ExperienceError, Group
from penstock.protocols.messages import TakenGroup
from penstock.protocols.wire import WireError
from penstock.services.broker.archive import open_group
from penstock.services.broker.seen import name_of
from penstock.services.broker.trackers import Table
from penstock.services.runtime.plain import plain

log = structlog.get_logger()

LETTERS = 4096
"""Of a prompt or an answer in a tracker's table."""


def rows(step: int, group: Group, columns: Mapping[str, np.ndarray]) -> Iterator[dict[str, Any]]:
    """One row for each trajectory of ``group``, which ``step`` was trained on. ``columns``: those with a value for each
    trajectory, the reward among them where one was asked for; NaN is written as null. What was given has finished as
    ``given``, and no version's; of a pair's answers the reward is `Trajectory.preference`."""
    for sample, trajectory in enumerate(group.trajectories):
        versions = trajectory.versions[(trajectory.versions >= 0) & (not trajectory.given)]
        row = {
            "step": step,
            "group": group.number,
            "sample": sample,
            "prompt": group.prompt.as_text(),
            "response": trajectory.text,
            "truth": _plain(group.prompt.truth),
            "tokens": trajectory.sampled,
            "finish": "given" if trajectory.given else trajectory.finish,
            "version_min": int(versions.min()) if versions.size else None,
            "version_max": int(versions.max()) if versions.size else None,
        }
        if group.prompt.source:
            row |= {"source": group.prompt.source}
        if trajectory.pictures:
            row |= {"pictures": [name_of(picture) for picture in trajectory.pictures]}
        if trajectory.failure:
            row |= {"failure": plain(trajectory.failure)}
        if trajectory.session != ALONE:
            row |= {"session": trajectory.session}
        row |= {f"{AGENT}{name}": value for name, value in trajectory.metrics.items()}
        row |= {name: _number(values[sample]) for name, values in columns.items()}
        row.setdefault(REWARD, trajectory.preference)
        yield row


def by_trajectory(group: Group, columns: Mapping[str, np.ndarray], by_token: Collection[str]) -> dict[str, np.ndarray]:
    """What `rows` are told of ``columns``, of which those ``by_token`` have a value for each token: a reward's count by
    their sums, and others are left out."""
    begins = np.cumsum([0, *(len(trajectory.tokens) for trajectory in group.trajectories)])[:-1]
    found = {name: values for name, values in columns.items() if name not in by_token}
    of_reward = [name for name in columns if name in by_token and name.startswith(f"{REWARD}/")]
    return found | {name: np.add.reduceat(columns[name], begins) for name in of_reward}


def _number(value: Any) -> float | None:
    number = float(value)
    return None if number != number else number


def _plain(truth: Any) -> Any:
    """What JSON can say of it."""
    return json.loads(json.dumps(truth, default=str))


def best_and_worst(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of some `rows` those with the highest and the lowest reward, if there are two; one without comes first."""
    ranked = sorted(found, key=lambda row: (row[REWARD] is None, row[REWARD] or 0.0))
    return [ranked[-1], *ranked[: len(ranked) > 1]]


def answers(
    step: int, groups: Sequence[TakenGroup], rewards: Sequence[str], by_token: Collection[str], count: int
) -> Table:
    """``count`` of the answers that ``step`` trains on, for trackers: one of each of its ``groups`` before a second of
    any. Each column has one type in all rows of all steps. ``rewards`` are the columns of the reward's parts, of which
    those ``by_token`` count by their sums; one that failed, or is not asked of the group's source, is NaN."""
    of_groups = filter(None, (list(_answers(step, taken, rewards, by_token)) for taken in groups))
    one_of_each = zip_longest(*islice(of_groups, count))
    found = (row for row in chain.from_iterable(one_of_each) if row is not None)
    columns = ("step", "group", "prompt", "response", REWARD, *rewards, "finish", "tokens", "lag")
    return Table("samples", columns, list(islice(found, count)))


def _answers(
    step: int, taken: TakenGroup, rewards: Iterable[str], by_token: Collection[str]
) -> Iterator[tuple[Any, ...]]:
    """None of a group that cannot be read, and no greedy one, which is only compared with."""
    try:
        group = open_group(taken)
    except (ExperienceError, WireError) as error:  # the trainer leaves it out too
        log.warning("answers cannot be read", group=taken.number, error=str(error))
        return
    prompt = _cut(group.prompt.as_text())
    parts = {name: np.full(len(group.trajectories), np.nan) for name in (REWARD, *rewards)}
    known = by_trajectory(group, taken.columns, by_token)
    parts |= {name: known[name] for name in parts.keys() & known.keys()}
    for sample, trajectory in enumerate(group.trajectories):
        if trajectory.greedy:
            continue
        numbers = [float(values[sample]) for values in parts.values()]
        if REWARD not in known and trajectory.preference is not None:
            numbers[0] = trajectory.preference
        oldest = step if trajectory.given else int(trajectory.versions[trajectory.versions >= 0].min(initial=step))
        finish = "given" if trajectory.given else trajectory.finish
        yield (
            step, group.number, prompt, _cut(trajectory.text), *numbers, finish, trajectory.sampled, step - oldest,
        )  # fmt: skip


def _cut(text: str) -> str:
    """The first `LETTERS` of it, and how many there were behind them."""
    return text if len(text) <= LETTERS else f"{text[:LETTERS]} … [{len(text) - LETTERS} more characters]"
