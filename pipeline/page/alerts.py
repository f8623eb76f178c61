"""What one should look at while a run goes on, out of its folder."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from penstock.pipeline.config import Config
from penstock.pipeline.report.findings import far_apart

Rows = Sequence[dict[str, Any]]

BROKER_SILENT_S = 15.0
"""The broker notes every second what everybody does."""
GONE_S = 60.0
"""Who was there so long ago, and no more, is missing."""
APART = 3.0
"""Times the usual time between two beats that is a pause of the run."""
LAST = 10
"""Steps that are the present."""
FALLEN = 0.5
"""Share of what had been gained whose loss is worth a word,"""
NOISE = 4.0
"""where it is more than so many standard errors."""
BEGINS_S = 600.0
"""For the first step of a session: large models are loaded before it."""
GROWN = 10.0
"""Times the median before that a gradient norm is worth a word."""
READ = (
    "step", "time", "train_step_s", "wait_s", "skipped", "mismatch_kl_k3", "mismatch_fresh_kl_k3", "mismatch_bound",
    "reward", "grad_norm",
)  # fmt: skip
"""What is read of a step's row."""


def alerts(config: Config, steps: Rows, beats: Rows, now: float) -> list[str]:
    """A sentence each, the gravest first. ``steps`` are the run's, in order, with `READ`; ``beats`` the rows of
    actors.jsonl, the newest last; ``now`` in seconds since 1970."""
    session = beats[sessions(beats)[-1] :] if beats else []
    return [*_processes(config, session, now), *_stalled(config, steps, session, now), *_learning(steps)]


def _processes(config: Config, beats: Rows, now: float) -> Iterator[str]:
    if not beats:
        return
    last = beats[-1]
    if now - last["time"] > BROKER_SILENT_S:
        yield (
            f"the broker has noted nothing for {now - last['time']:.0f} s: the run is stopped, or its broker hangs; "
            "penstock status says which"
        )
        return
    recent = [beat for beat in beats if beat["time"] > last["time"] - GONE_S]
    there = {name for beat in recent for name in beat["actors"]}
    silent = {name: member["silent_s"] for name, member in last["actors"].items()} | last.get("lost", {})
    for name in sorted(there | silent.keys()):
        if name not in silent:
            yield f"{name} was there less than {GONE_S:.0f} s ago, and is gone"
        elif silent[name] > config.broker.dead_after_s:
            yield f"{name} is not heard of for {silent[name]:.0f} s: it hangs, or its machine is gone"
        elif len({beat["actors"][name]["pid"] for beat in recent if name in beat["actors"]}) > 1:
            yield f"{name} has died within the last {GONE_S:.0f} s, and was started again; logs/{name}*.stderr says why"


def _stalled(config: Config, steps: Rows, beats: Rows, now: float) -> Iterator[str]:
    if not beats or len(steps) >= config.trainer.counted_steps or now - beats[-1]["time"] > BROKER_SILENT_S:
        return
    begun, last = beats[0]["time"], steps[-1]["time"] if steps else 0.0
    usual = _median([row.get("train_step_s", 0.0) + row["wait_s"] for row in steps])
    since, patience = now - max(begun, last), config.broker.stall_s if last > begun else BEGINS_S
    if since > patience and since > 3 * usual:
        queues = ", ".join(f"{count} {name}" for name, count in beats[-1]["queues"].items())
        yield (
            f"no step was completed for {since:.0f} s (usually {usual:.1f} s); groups: {queues}; penstock status says "
            "what is waited for"
        )


def sessions(beats: Rows) -> list[int]:
    """Which of ``beats`` are the first ones since the run was started, or gone on with: where nothing was noted for
    much longer than is usual there, or all of several processes are others. Of a long run not every beat is there."""
    gaps = [later["time"] - earlier["time"] for earlier, later in pairwise(beats)]
    found, before = [0] * bool(beats), _processes_of(beats[0]) if beats else set()
    for place, gap in enumerate(gaps):
        here = _processes_of(beats[place + 1])
        usual = _median(gaps[max(0, place - LAST) : place] or gaps[place + 1 : place + 2])
        replaced = len(before) > 1 and bool(here) and not here & before
        if gap > max(GONE_S, APART * usual) or replaced:
            found.append(place + 1)
        before = here or before
    return found


def _processes_of(beat: dict[str, Any]) -> set[tuple[str, int]]:
    return {(name, member["pid"]) for name, member in beat["actors"].items()}


def _learning(steps: Rows) -> Iterator[str]:
    last, before = steps[-LAST:], steps[:-LAST]
    if skipped := [row["step"] for row in last if row.get("skipped", 0) >= 1]:
        yield f"{len(skipped)} of the last {len(last)} steps changed no weight, since loss or gradient were not finite"
    yield from far_apart(last, LAST / 2, f"the last {len(last)} steps")
    if not before:
        return
    windows = [_rewards(steps[i : i + LAST]) for i in range(0, len(steps) - LAST + 1, LAST)]
    known, present = [mean_error for mean_error in windows if mean_error], _rewards(last)
    if known and present:
        best, now = max(known), present
        fall = best[0] - now[0]
        if fall > FALLEN * (best[0] - known[0][0]) > 0 and fall > NOISE * math.hypot(best[1], now[1]):
            yield f"the reward has fallen: {now[0]:.3g} in the last {LAST} steps, {best[0]:.3g} at its best"
    norms, largest = _norms(before[-10 * LAST :]), max(_norms(last), default=0.0)
    if len(norms) >= LAST and largest > GROWN * _median(norms):
        yield f"a gradient of norm {largest:.3g} in the last {LAST} steps; {_median(norms):.3g} is usual here"


def _rewards(rows: Rows) -> tuple[float, float] | None:
    """Their mean, and its standard error."""
    values = [row["reward"] for row in rows if row.get("reward") is not None and math.isfinite(row["reward"])]
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (len(values) - 1) / len(values))


def _norms(rows: Rows) -> list[float]:
    """Of gradients that were finite."""
    found = [row.get("grad_norm") or 0.0 for row in rows]
    return [norm for norm in found if norm and math.isfinite(norm)]


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
