"""Trajectories for people: a flat row each, as samples.jsonl and `penstock rollouts` have them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from penstock.protocols.columns import REWARD
from penstock.protocols.experience import ALONE, Group


def rows(step: int, group: Group, columns: Mapping[str, np.ndarray]) -> Iterator[dict[str, Any]]:
    """One row for each trajectory of ``group``, which ``step`` was trained on. ``columns``: those with a value for each
    trajectory, the reward among them; NaN is written as null."""
    for sample, trajectory in enumerate(group.trajectories):
        versions = trajectory.versions[trajectory.versions >= 0]
        row = {
            "step": step,
            "group": group.number,
            "sample": sample,
            "prompt": group.prompt.as_text(),
            "response": trajectory.text,
            "truth": _plain(group.prompt.truth),
            "tokens": trajectory.sampled,
            "finish": trajectory.finish,
            "version_min": int(versions.min()) if versions.size else None,
            "version_max": int(versions.max()) if versions.size else None,
        }
        if group.prompt.source:
            row |= {"source": group.prompt.source}
        if trajectory.session != ALONE:
            row |= {"session": trajectory.session}
            row |= {f"agent/{name}": value for name, value in trajectory.metrics.items()}
        yield row | {name: _number(values[sample]) for name, values in columns.items()}


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
