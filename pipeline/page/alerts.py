"""What one should look at while a run goes on, out of its folder."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from penstock.pipeline.config import Config

Rows = Sequence[dict[str, Any]]

BROKER_SILENT_S = 15.0
"""The broker notes every second what everybody does."""
GONE_S = 60.0
"""Who was there so long ago, and no more, is missing."""
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


def alerts(config: Config, steps: Rows, beats: Rows, now: float) -> list[str]:
    """A sentence each, the gravest first. ``steps`` are the run's, in order, ``beats`` the rows of actors.jsonl, the
    newest last; ``now`` in seconds since 1970."""
    return [*_processes(config, beats, now), *_stalled(config, steps, beats, now), *_learning(steps)]


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
    for name in sorted(there):
        member = last["actors"].get(name)
        if member is None:
            yield f"{name} was there less than {GONE_S:.0f} s ago, and is gone"
        elif member["silent_s"] > config.broker.dead_after_s:
            yield f"{name} is not heard of for {member['silent_s']:.0f} s: it hangs, or its machine is gone"
        elif len({beat["actors"][name]["pid"] for beat in recent if name in beat["actors"]}) > 1:
            yield f"{name} has died within the last {GONE_S:.0f} s, and was started again; logs/{name}*.stderr says why"


def _stalled(config: Config, steps: Rows, beats: Rows, now: float) -> Iterator[str]:
    if not beats or len(steps) >= config.trainer.steps or now - beats[-1]["time"] > BROKER_SILENT_S:
        return
    begun, last = _session(beats), steps[-1]["time"] if steps else 0.0
    usual = _median([row.get("train_step_s", 0.0) + row["wait_s"] for row in steps])
    since, patience = now - max(begun, last), config.broker.stall_s if last > begun else BEGINS_S
    if since > patience and since > 3 * usual:
        queues = ", ".join(f"{count} {name}" for name, count in beats[-1]["queues"].items())
        yield (
            f"no step was completed for {since:.0f} s (usually {usual:.1f} s); groups: {queues}; penstock status says "
            "what is waited for"
        )


def _session(beats: Rows) -> float:
    """When the run was last started, or gone on with."""
    times = [beat["time"] for beat in beats]
    gaps = [after for before, after in pairwise(times) if after - before > GONE_S]
    return float(gaps[-1] if gaps else times[0])


def _learning(steps: Rows) -> Iterator[str]:
    last, before = steps[-LAST:], steps[:-LAST]
    if skipped := [row["step"] for row in last if row.get("skipped", 0) >= 1]:
        yield f"{len(skipped)} of the last {len(last)} steps changed no weight, since loss or gradient were not finite"
    apart = [row for row in last if row.get("mismatch_kl_k3", 0.0) > row.get("mismatch_bound", float("inf"))]
    if len(apart) > LAST / 2:
        yield (
            f"engines and trainer disagreed in {len(apart)} of the last {len(last)} steps (mismatch_kl_k3 above "
            "trainer.mismatch_warning)"
        )
    if not before:
        return
    windows = [_rewards(steps[i : i + LAST]) for i in range(0, len(steps) - LAST + 1, LAST)]
    known, present = [mean_error for mean_error in windows if mean_error], _rewards(last)
    if known and present:
        best, now = max(known), present
        fall = best[0] - now[0]
        if fall > FALLEN * (best[0] - known[0][0]) > 0 and fall > NOISE * math.hypot(best[1], now[1]):
            yield f"the reward has fallen: {now[0]:.3g} in the last {LAST} steps, {best[0]:.3g} at its best"
    norms = [row["grad_norm"] for row in before[-10 * LAST :] if row.get("grad_norm")]
    largest = max((row.get("grad_norm") or 0.0 for row in last), default=0.0)
    if len(norms) >= LAST and largest > GROWN * _median(norms):
        yield f"a gradient of norm {largest:.3g} in the last {LAST} steps; {_median(norms):.3g} is usual here"


def _rewards(rows: Rows) -> tuple[float, float] | None:
    """Their mean, and its standard error."""
    values = [row["reward"] for row in rows if row.get("reward") is not None and row["reward"] == row["reward"]]
    if len(values) < 2:
        return None
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
