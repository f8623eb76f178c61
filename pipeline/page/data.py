"""What the page shows of a run, out of its folder: numbers by column, so that a browser need not take them apart."""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.pipeline.config import Config, ConfigError, dump, load
from penstock.pipeline.page.alerts import READ, alerts, sessions
from penstock.pipeline.page.beats import Beats
from penstock.pipeline.run.summary import finite, steps_in
from penstock.protocols.run_lock import read_summary
from penstock.services.runtime.lines import lines_behind, parsed, rows_behind
from penstock.services.runtime.plugins import describe

DIGITS = 6
VERSION = re.compile(rb'"version": ?(\d+)')
LOADS = ("time", "receiver", "version", "pause_s", "receive_s")
"""What is shown of a version's way into a rollout."""
LOADED = 20_000
"""So many of these at once, about, at most."""
Rows = Sequence[dict[str, Any]]


def names(folders: Sequence[Path]) -> list[str]:
    """What a page calls the runs in ``folders``: of each the end of its path that is the end of no other's.

    >>> names([Path("/a/run"), Path("/b/run"), Path("/b/first")])
    ['a/run', 'b/run', 'first']
    """
    every = [folder.absolute().parts for folder in folders]
    found = []
    for parts in every:
        others = {other for other in every if other != parts}
        sizes = (n for n in range(1, len(parts)) if not any(other[-n:] == parts[-n:] for other in others))
        found.append("/".join(parts[-next(sizes, len(parts)) :]))
    return found


def unread(folder: Path, error: Exception) -> str:
    """Why the run in ``folder`` is not shown."""
    return f"{folder} cannot be read: {error if isinstance(error, ConfigError) else describe(error)}"


class RunFiles:
    """The files of the run in ``folder``, for a page that asks again every two seconds: what was read of them once is
    not read again."""

    def __init__(self, folder: Path, name: str = "") -> None:
        self._folder = folder
        self.name = name or folder.name
        """What the page calls it."""
        self._beats = Beats(folder / "actors.jsonl")
        self._steps: dict[int, dict[str, Any]] = {}
        """Of every step what `alerts` reads of it."""
        self._read = 0
        """How far metrics.jsonl was looked at for them, in bytes."""
        self._config: tuple[int, Config, str] | None = None
        """When it was written, and the same as text."""
        self._lock = threading.Lock()

    @property
    def identity(self) -> str:
        """Of this run alone: its folder, and when it began there."""
        about = self._folder / "run.name"
        began = about.stat().st_mtime_ns if about.is_file() else 0
        return hashlib.sha256(f"{self._folder.resolve()} {began}".encode()).hexdigest()[:16]

    def data(self, metrics: int = 0, loads: int = 0, beats: str = "") -> dict[str, Any]:
        """Everything but its rollouts; of steps, evaluations and loads those behind so many bytes of metrics.jsonl and
        weights.jsonl, and of beats those that are new, as the answer before has them in ``seen``; ``beats.behind`` are
        those before them."""
        with self._lock:
            return self._data(metrics, loads, beats)

    def unread(self, error: str) -> dict[str, Any]:
        """The same of a run that cannot be read, and why."""
        seen = {"metrics": 0, "loads": 0, "beats": ""}
        return {
            "id": self.identity, "name": self.name, "unread": error, "config": "", "wanted": 0, "summary": None,
            "alerts": [], "columns": [], "steps": {}, "evaluations": [], "losses": [], "sampled": [],
            "beats": _beats([], 0), "loads": {}, "seen": seen,
        }  # fmt: skip

    def _data(self, metrics: int, loads: int, seen_beats: str) -> dict[str, Any]:
        config, text = self._configured()
        rows, metrics = self._rows(metrics)
        steps = steps_in(rows)
        beats, with_latest = self._beats.read()
        summary = read_summary(self._folder)
        every = [self._steps[step] for step in sorted(self._steps)]
        look = summary.get("look_at_this", []) if summary else alerts(config, every, with_latest, time.time())
        loaded, loads = _loads(self._folder / "weights.jsonl", loads)
        return {
            "id": self.identity,
            "name": self.name,
            "config": text,
            "wanted": config.trainer.counted_steps,
            "summary": summary,
            "alerts": look,
            "columns": [name for name in config.columns.by_name if any(name in row for row in steps)],
            "steps": by_column(steps),
            "evaluations": [
                {"step": row["step"], "label": row["label"], "sets": row["sets"], "parts": row.get("parts", {})}
                for row in rows
                if row["kind"] == "eval"
            ],
            "losses": [{"step": row["step"], "sets": row["sets"]} for row in rows if row["kind"] == "eval_loss"],
            "sampled": [name for name, how in config.prompts.eval_sampling.items() if how.temperature > 0],
            "beats": _beats(beats, self._beats.behind(seen_beats)),
            "loads": by_column(loaded),
            "seen": {"metrics": metrics, "loads": loads, "beats": self._beats.seen},
        }

    def _configured(self) -> tuple[Config, str]:
        """Its config, which another start may have changed."""
        path = self._folder / "config.yaml"
        written = path.stat().st_mtime_ns
        if self._config is None or self._config[0] != written:
            config = load(path)
            self._config = written, config, dump(config)
        return self._config[1:]

    def _rows(self, seen: int) -> tuple[Rows, int]:
        """Of metrics.jsonl those behind ``seen``, and where the last one ends."""
        path = self._folder / "metrics.jsonl"
        if self._read < seen:  # by another server
            before, self._read = rows_behind(path, self._read)
            self._note(before)
        rows, end = rows_behind(path, seen)
        self._note(rows)
        self._read = max(self._read, end)
        return rows, end

    def _note(self, rows: Rows) -> None:
        for row in rows:
            if row["kind"] == "step":
                self._steps[row["step"]] = {name: row[name] for name in READ if name in row}


def _loads(path: Path, at: int) -> tuple[Rows, int]:
    """`LOADS` of the rows behind byte ``at``, and where the last one ends: of a long run those of every second, third,
    … version."""
    every = -(-sum(1 for _ in lines_behind(path, at)) // LOADED) or 1
    rows = []
    for line in lines_behind(path, at):
        at += len(line)
        if (said := VERSION.search(line)) and int(said[1]) % every == 0:  # parsing all of a long run takes a minute
            rows += [{key: row.get(key) for key in LOADS} for row in parsed(line)]
    return rows, at


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


def _beats(beats: Rows, behind: int) -> dict[str, Any]:
    """What every actor did: for each beat but the first ones that are ``behind``, and of each actor that was there,
    null where it was not; and which of all beats are the first ones of a start."""
    new = beats[behind:]
    names = sorted({name for beat in new for name in beat["actors"]})
    actors = {}
    for name in names:
        mine = [beat["actors"].get(name) for beat in new]
        actors[name] = {
            "kind": next(member["kind"] for member in mine if member),
            "busy": [member and _value(float(member.get("busy", 0.0))) for member in mine],
            "pid": [member and member["pid"] for member in mine],
            "tokens_per_s": [member and _value(float(member.get("tokens_per_s", 0.0))) for member in mine],
        }
    queues = new[-1]["queues"] if new else {}
    return {
        "behind": behind,
        "time": [_value(beat["time"]) for beat in new],
        "sessions": sessions(beats),
        "actors": actors,
        "queues": {name: [beat["queues"].get(name) for beat in new] for name in queues},
    }


def as_json(data: Any) -> str:
    """To stand in a page's script: it cannot end that."""
    try:
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    except ValueError:  # of a step whose rewards were all missing, say
        text = json.dumps(finite(data), separators=(",", ":"))
    return text.replace("<", "\\u003c")


def evenly(numbers: Iterable[int], count: int) -> list[int]:
    """At most ``count`` of them, evenly, the last one among them."""
    every = sorted(numbers)
    if len(every) <= count:
        return every
    return sorted({every[round(i * (len(every) - 1) / max(1, count - 1))] for i in range(count)})
