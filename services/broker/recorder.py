"""What a run writes down for people, each a .jsonl: metrics, actors, ledger, drops, weights, samples, answers of
evaluations; trackers too."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

import structlog

from penstock.services.broker.beats import Beats
from penstock.services.broker.seen import keep
from penstock.services.broker.trackers import Table, Trackers
from penstock.services.runtime.files import open_lines
from penstock.services.runtime.lines import line_of

log = structlog.get_logger()

TAIL = 1 << 20
"""Bytes at the end of a file in which its last line is looked for."""


def _last_step(path: Path) -> int:
    """Of the last whole row; -1 where there is none."""
    if not path.is_file():
        return -1
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        lines = file.read().splitlines(keepends=True)
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return -1


class Recorder:
    """Appends to the run's files, a line at a time."""

    def __init__(self, folder: Path, trackers: Trackers) -> None:
        self._folder = folder
        self._learners: dict[str, TextIO] = {}
        self._metrics = open_lines(folder / "metrics.jsonl")
        self._beats = Beats(folder / "actors.jsonl")
        self._ledger = open_lines(folder / "ledger.jsonl")
        self._drops = open_lines(folder / "dropped.jsonl")
        self._weights = open_lines(folder / "weights.jsonl")
        self._sampled = _last_step(folder / "samples.jsonl")
        self._samples = open_lines(folder / "samples.jsonl")
        self._evaluated = open_lines(folder / "eval_samples.jsonl")
        self._trackers = trackers

    def sync(self) -> None:
        """Until the disk has what the audit reads: the store may forget it then."""
        for file in (self._ledger, self._drops):
            os.fsync(file.fileno())

    def step(self, row: dict[str, Any]) -> None:
        """One line a training step."""
        self._write(self._metrics, {"kind": "step", **row})
        self._trackers.log(row)

    def evaluation(self, row: dict[str, Any]) -> None:
        """One line an evaluation."""
        self._write(self._metrics, {"kind": "eval", **row})
        if row["reward"] is not None:
            sets = {f"eval_reward/{name}": reward for name, reward in row["sets"].items()}
            parts = {f"eval/{name}": value for name, value in row["parts"].items()}
            self._trackers.log({"step": row["step"], "eval_reward": row["reward"], **sets, **parts})

    def evaluated(self, found: Iterable[dict[str, Any]]) -> None:
        """One line each answer of an evaluation that is kept for people."""
        for row in found:
            self._write(self._evaluated, row)

    def losses(self, row: dict[str, Any]) -> None:
        """One line each time that the loss on held-out rows was measured."""
        self._write(self._metrics, {"kind": "eval_loss", **row})
        told = {f"eval_loss/{name}": loss for name, loss in row["sets"].items()}
        for name, found in row.get("pairs", {}).items():
            told |= {f"eval_pairs/{name}/{metric}": value for metric, value in found.items()}
        self._trackers.log({"step": row["step"], **told})

    def answers(self, step: int, size: int, make: Callable[[], Table]) -> None:
        """Some of a step, for trackers alone (`Trackers.table`)."""
        self._trackers.table(step, size, make)

    @property
    def failing_trackers(self) -> dict[str, str]:
        """See `Trackers.failing`."""
        return self._trackers.failing

    def actors(self, members: dict[str, dict[str, Any]], queues: dict[str, int], lost: dict[str, float]) -> None:
        """One line a beat: what every actor does, how deep the queues are, and who is lost."""
        self._beats.write(members, queues, lost)

    def ledger(self, row: dict[str, Any]) -> None:
        """One line a commit; a step that was redone has several, of which the last counts."""
        self._write(self._ledger, row)

    def learned(self, kind: str, row: dict[str, Any]) -> None:
        """One line a step of a learner beside the trainer, in a file of its own: of several, the last counts."""
        if kind not in self._learners:
            self._learners[kind] = open_lines(self._folder / f"{kind}.jsonl")
        self._write(self._learners[kind], row)

    def drop(self, number: int, reason: str, kind: str) -> None:
        """One line a dropped group."""
        self._write(self._drops, {"group": number, "kind": kind, "reason": reason})

    def load(self, row: dict[str, Any]) -> None:
        """One line each time a rollout has loaded a version: bytes, and seconds of every phase."""
        self._write(self._weights, row)

    def wants_samples(self, step: int) -> bool:
        """Those of ``step`` are not written yet: a step that is redone has the same."""
        return step > self._sampled

    def samples(self, step: int, found: Iterable[dict[str, Any]], pictures: Iterable[bytes]) -> None:
        """One line each trajectory of ``step`` that is kept for people (`samples.rows`), and a file each of the
        ``pictures`` that they show."""
        self.keep_pictures(pictures)
        for row in found:
            self._write(self._samples, row)
        self._sampled = step

    def keep_pictures(self, pictures: Iterable[bytes]) -> None:
        """A file each of those that kept answers show."""
        try:
            keep(self._folder, pictures)
        except OSError as error:  # a full disk, say: the rows name them all the same
            log.warning("pictures of samples are not kept", error=str(error))

    def close(self, error: str | None = None) -> None:
        """Closes the files; trackers are told the ``error`` of a run that has failed."""
        files = (self._metrics, self._ledger, self._drops, self._weights, self._samples, self._evaluated)
        for file in (*files, *self._learners.values()):
            file.close()
        self._beats.close()
        self._trackers.close(error)

    @staticmethod
    def _write(file: Any, row: dict[str, Any]) -> None:
        try:
            file.write(line_of(row, default=float) + "\n")
        except OSError as error:  # a full disk, say: what a message has said is in the store all the same
            log.warning("a line for people is lost", file=file.name, error=str(error))
