"""What the page shows of a run, out of its folder: numbers by column, so that a browser need not take them apart."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.pipeline.config import dump, load
from penstock.pipeline.page.alerts import alerts
from penstock.pipeline.run.summary import read_lines, read_summary, steps_in

BEATS = 1500
"""Points over time, at most: of more, every second, every third, … is kept."""
LATEST = 120
"""Of the last ones all are looked at: a row a second."""
DIGITS = 6
Rows = Sequence[dict[str, Any]]


def run_data(folder: Path, after: int = -1, summary: dict[str, Any] | None = None) -> dict[str, Any]:
    """Everything but its rollouts; of the steps those behind ``after``. ``summary``: where none is on the disk yet."""
    config = load(folder / "config.yaml")
    rows = read_lines(folder / "metrics.jsonl")
    every = steps_in(rows)
    steps = [row for row in every if row["step"] > after]
    beats, last = _beats_of(folder / "actors.jsonl")
    summary = summary or read_summary(folder)
    look = summary.get("look_at_this", []) if summary else alerts(config, every, [*beats, *last], time.time())
    loads = read_lines(folder / "weights.jsonl")
    return {
        "name": folder.name,
        "config": dump(config),
        "wanted": config.trainer.steps,
        "summary": summary,
        "alerts": look,
        "columns": [name for name in config.columns.by_name if any(name in row for row in steps)],
        "steps": by_column(steps),
        "evaluations": [
            {"step": row["step"], "label": row["label"], "sets": row["sets"]} for row in rows if row["kind"] == "eval"
        ],
        "beats": _beats(beats),
        "loads": by_column(
            [{key: row.get(key) for key in ("time", "receiver", "version", "pause_s", "receive_s")} for row in loads]
        ),
    }


def _beats_of(path: Path) -> tuple[Rows, Rows]:
    """`BEATS` of the rows at most, from end to end; and the latest that are not among them. A run writes one a second:
    of all of them few are taken apart."""
    if not path.is_file():
        return [], []
    with path.open("rb") as file:
        count = sum(1 for _ in file)
    every = max(1, -(-count // BEATS))
    rows = read_lines(path, every)
    return rows, [] if every == 1 else read_lines(path, 1, skip=max(0, count - LATEST))


def by_column(rows: Rows) -> dict[str, list[Any]]:
    """``{name: one value for each row}``; null where a row has none, or no number."""
    names = dict.fromkeys(name for row in rows for name in row if name != "kind")
    return {name: [_value(row.get(name)) for row in rows] for name in names}


def _value(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) and abs(value) < 1e9 else _time(value)
    return value


def _time(value: float) -> float | None:
    """A time has more digits than others; infinity is nothing that JSON could say."""
    return round(value, 3) if math.isfinite(value) else None


def _beats(beats: Rows) -> dict[str, Any]:
    """What every actor did: for each beat, and of each actor, null where it was not there."""
    names = sorted({name for beat in beats for name in beat["actors"]})
    actors = {}
    for name in names:
        mine = [beat["actors"].get(name) for beat in beats]
        actors[name] = {
            "kind": next(member["kind"] for member in mine if member),
            "busy": [member and _value(float(member.get("busy", 0.0))) for member in mine],
            "pid": [member and member["pid"] for member in mine],
            "tokens_per_s": [member and _value(float(member.get("tokens_per_s", 0.0))) for member in mine],
        }
    queues = beats[-1]["queues"] if beats else {}
    return {
        "time": [_value(beat["time"]) for beat in beats],
        "actors": actors,
        "queues": {name: [beat["queues"].get(name) for beat in beats] for name in queues},
    }


def as_json(data: Any) -> str:
    """To stand in a page's script: it cannot end that."""
    try:
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    except ValueError:  # a summary whose last rewards were all missing, say
        text = json.dumps(json.loads(json.dumps(data), parse_constant=lambda _: None), separators=(",", ":"))
    return text.replace("<", "\\u003c")


def evenly(numbers: Iterable[int], count: int) -> list[int]:
    """At most ``count`` of them, evenly, the last one among them."""
    every = sorted(numbers)
    if len(every) <= count:
        return every
    return sorted({every[round(i * (len(every) - 1) / max(1, count - 1))] for i in range(count)})
