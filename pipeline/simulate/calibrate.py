"""Costs as a run had them that is over.

What a decoding step takes is nowhere written down: it is what makes the simulated run as fast as the real one was. So
the run should be one in which generation is waited for, and nobody for a core: with ``gate.max_lag=0``, and rewards
that answer at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from pathlib import Path
from statistics import median

import psutil

from penstock.pipeline.config import Config, ConfigError, load
from penstock.pipeline.run.summary import steps_of
from penstock.pipeline.simulate.costs import Costs, mean
from penstock.pipeline.simulate.world import World
from penstock.services.broker import archive
from penstock.services.runtime.gpus import visible_gpus
from penstock.services.runtime.lines import read_lines

SKIPPED = 2
"""First steps, in which everything warms up."""
LEAST = 10
STEPS = 40
"""That a trial simulates."""
PER_SEQUENCE = 1 / 64
"""Of a decoding step, what each sequence adds: as small batches on a CPU were seen to."""
READ_STEPS = 20
"""Steps whose lengths are looked at."""
TRIALS = 14
FASTEST_S, SLOWEST_S = 1e-6, 10.0
"""Between which a decoding step is looked for."""
STOOD = 10
"""A run that took so many times as long as it mostly does stood still meanwhile, and was taken up again."""


def like(run: Path, warn: Callable[[str], None]) -> Costs:
    """As the run in this folder had them, on this machine. Raises `ConfigError` where it says too little; ``warn`` is
    told where it does not show what decoding takes, and of what cannot be read."""
    config = load(run / "config.yaml")
    if config.rollout.all_given:
        raise ConfigError(f"--like {run}: all answers are given (rollout.given.answers), and it shows no rollouts")
    rows = steps_of(run)[SKIPPED:]
    if len(rows) < LEAST:
        raise ConfigError(f"--like {run}: {len(rows) + SKIPPED} steps say too little; it takes {LEAST + SKIPPED}")
    every = read_lines(run / "weights.jsonl")
    loads = [row for row in every if "gather_s" in row]  # the others are of versions that were there already
    lengths, prompt = _lengths(run, warn)
    tokens = sum(row["tokens"] for row in rows)
    known = Costs(
        length=mean([row["response_tokens"] for row in rows]),
        lengths=lengths,
        prompt=prompt,
        train_token_s=sum(row["train_step_s"] for row in rows) / tokens,
        publish_s=mean([row["receive_s"] + row["verify_s"] + row["prepare_s"] + row["gather_s"] for row in loads]),
        pause_s=mean([row["pause_s"] for row in loads]),
        switch_s=mean([row.get("turn_wait_s", 0.0) for row in rows]),
        critic_values_token_s=sum(row.get("critic_values_s", 0.0) for row in rows) / tokens,
        critic_train_token_s=sum(row.get("critic_train_s", 0.0) for row in rows) / tokens,
        score_token_s=_scoring(run, config, rows[0]["time"], rows[-1]["time"]) / tokens,
        cores=None if visible_gpus() else float(psutil.cpu_count() or 1),
    )
    return known.model_copy(update=_decoding(config, known, _rate([row["time"] for row in rows]), warn))


def _rate(times: Sequence[float]) -> float:
    """Steps a second of a run at work, which ended at these."""
    worked = [gap for gap in _gaps(times) if gap]
    return len(worked) / sum(worked)


def _gaps(times: Sequence[float]) -> list[float]:
    """Seconds between each of these and the next; 0 where the run stood still between them."""
    gaps = [after - before for before, after in pairwise(times)]
    longest = STOOD * median(gaps) if gaps else 0.0
    return [gap if gap <= longest else 0.0 for gap in gaps]


def _lengths(run: Path, warn: Callable[[str], None]) -> tuple[tuple[int, ...], float]:
    """Of the responses in the archive, where there is one; and of a prompt on average."""
    found: list[int] = []
    prompts: list[int] = []
    for batch, _ in islice(archive.read(run, unread=warn), READ_STEPS):
        for taken in batch.groups:
            for trajectory in archive.open_group(taken).trajectories:
                sampled = int(trajectory.loss_mask.sum())
                found.append(sampled)
                prompts.append(len(trajectory.tokens) - sampled)
    return tuple(found), mean(prompts)


def _scoring(run: Path, config: Config, begun: float, ended: float) -> float:
    """Seconds that scorers other than the rewards were busy between these times, on average over their kinds."""
    kinds = {column.scorer for column in config.columns.scored} - {"reward"}
    beats = read_lines(run / "actors.jsonl")
    worked = 0.0
    for gap, beat in zip(_gaps([beat["time"] for beat in beats]), beats[1:], strict=False):
        busy = [a.get("busy") or 0.0 for a in beat["actors"].values() if a["kind"] in kinds]
        if begun < beat["time"] <= ended:
            worked += sum(busy) * gap
    return worked / max(1, len(kinds))


def _decoding(config: Config, known: Costs, steps_per_s: float, warn: Callable[[str], None]) -> dict[str, float]:
    """What a decoding step takes, found by halving. ``warn`` is told where nothing makes the simulated run as fast as
    the real one."""
    low, high = FASTEST_S, SLOWEST_S
    for _ in range(TRIALS):
        middle = (low * high) ** 0.5
        trial = known.model_copy(update=_step(middle))
        if World(config, trial, STEPS).run().steps_per_s > steps_per_s:
            low = middle
        else:
            high = middle
    if low == FASTEST_S or high == SLOWEST_S:
        other = "slower" if low == FASTEST_S else "faster"
        warn(
            f"--like: however long decoding took, the simulated run is {other} than the real one's {steps_per_s:.3g} "
            "steps a second, so decode_s means nothing; take a run with gate.max_lag=0, rewards that answer at once, "
            "and cores enough, or give --cost decode_s=…"
        )
    return _step((low * high) ** 0.5)


def _step(seconds: float) -> dict[str, float]:
    return {"decode_s": seconds, "decode_sequence_s": seconds * PER_SEQUENCE}
