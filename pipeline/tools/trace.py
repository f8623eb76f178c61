"""`penstock trace`: what every process of a run did when, as a trace that https://ui.perfetto.dev opens.

The format is Chrome's trace events, in JSON: times in microseconds since the run's first beat; a process of the trace
is an actor of the run. Nothing was recorded for it: it is made of the files that every run has.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.pipeline.page.alerts import sessions
from penstock.pipeline.page.data import as_json
from penstock.pipeline.run.summary import check_run, steps_in
from penstock.pipeline.tools.output import output
from penstock.services.runtime.files import write_whole
from penstock.services.runtime.lines import read_lines

Event = dict[str, Any]
Rows = list[dict[str, Any]]
WORK, WAIT = 0, 1
"""Threads of an actor in the trace: what it does, and what it waits for."""
TOLD = ("reward", "loss", "lag_mean", "lag_max", "tokens")
"""Of a step, beside its times."""
LOAD = (("receive_s", "receive"), ("prepare_s", "prepare"), ("pause_s", "swap: decoding stands still"))
"""How a rollout takes a version, in order; the last of it ends when the row was written."""


def write_trace(run: Path, file: Path) -> int:
    """Writes the trace of the run in the folder ``run``; returns how many events it has. Raises `ConfigError` where
    that is no run's folder, or ``file`` cannot be written."""
    check_run(run)
    rows = read_lines(run / "metrics.jsonl")
    beats, loads = read_lines(run / "actors.jsonl"), read_lines(run / "weights.jsonl")
    found = list(events(steps_in(rows), [row for row in rows if row["kind"] == "eval"], beats, loads))
    with output(file, "--out") as whole:
        write_whole(whole, as_json({"displayTimeUnit": "ms", "traceEvents": found}))
    return len(found)


def events(steps: Rows, evaluations: Rows, beats: Rows, loads: Rows) -> Iterator[Event]:
    """Of the rows of a run's files."""
    names = dict.fromkeys(name for beat in beats for name in beat["actors"])
    kinds = {name: next(b["actors"][name]["kind"] for b in beats if name in b["actors"]) for name in names}
    ids = {name: number for number, name in enumerate(names, 1)}
    times = [row["time"] for row in (*beats, *steps, *loads)]
    start = min([*times, *(step["time"] - step.get("train_step_s", 0.0) for step in steps)], default=0.0)
    for name, pid in ids.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        for thread, words in ((WORK, "works"), (WAIT, "waits")):
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": thread, "args": {"name": words}}

    def at(time: float) -> float:
        return round((time - start) * 1e6, 1)

    def span(name: str, pid: int, thread: int, begin: float, end: float, **about: Any) -> Event:
        length = max(0.0, round((end - begin) * 1e6, 1))
        return {"ph": "X", "name": name, "pid": pid, "tid": thread, "ts": at(begin), "dur": length, "args": about}

    trainer = next((ids[name] for name in names if kinds[name] == "trainer"), 0)
    for step in steps:
        end, about = step["time"], {name: step.get(name) for name in TOLD}
        begin = end - step.get("train_step_s", 0.0)
        yield span(f"step {step['step']}", trainer, WORK, begin, end, **about)
        if waited := step.get("turn_wait_s"):
            yield span("waits until rollouts sleep", trainer, WAIT, begin - waited, begin, step=step["step"])
            begin -= waited
        if waited := step.get("wait_s"):
            yield span("waits for groups", trainer, WAIT, begin - waited, begin, step=step["step"])
        if waited := step.get("publish_wait_s"):
            yield span("waits until the version before was read", trainer, WAIT, end - waited, end, step=step["step"])
    for load in loads:
        end, rollout = load["time"], ids.get(load["receiver"])
        if rollout is None:
            continue
        for key, words in reversed(LOAD):
            begin = end - (load.get(key) or 0.0)
            if end > begin:
                yield span(f"version {load['version']}: {words}", rollout, WORK, begin, end)
            end = begin
    for row in evaluations:
        about = {"reward": row["reward"], **row["sets"]}
        name = f"evaluation {row['label']}"
        yield {"ph": "i", "s": "g", "name": name, "pid": trainer, "ts": at(row["time"]), "args": about}
    yield from _counters(beats, ids, at)
    yield from _deaths(beats, ids, at)


def _counters(beats: Rows, ids: dict[str, int], at: Any) -> Iterator[Event]:
    """How busy each actor was, what it generated, and how long the queues are, second by second."""
    for beat in beats:
        ts = at(beat["time"])
        for name, actor in beat["actors"].items():
            for counter in ("busy", "tokens_per_s"):
                if counter in actor:
                    yield {"ph": "C", "name": counter, "pid": ids[name], "ts": ts, "args": {counter: actor[counter]}}
        queues = {name: value for name, value in beat["queues"].items() if isinstance(value, int | float)}
        yield {"ph": "C", "name": "groups in the queues", "pid": 0, "ts": ts, "args": queues}


def _deaths(beats: Rows, ids: dict[str, int], at: Any) -> Iterator[Event]:
    last: dict[str, int] = {}
    starts = set(sessions(beats))
    for place, beat in enumerate(beats):
        if place in starts:  # of a run that was stopped nobody has died
            last.clear()
        for name, actor in beat["actors"].items():
            if last.get(name, actor["pid"]) != actor["pid"]:
                yield {"ph": "i", "s": "p", "name": "started again", "pid": ids[name], "ts": at(beat["time"])}
            last[name] = actor["pid"]
