"""What a run writes down for people, each a .jsonl: metrics, actors, ledger, drops, weights, samples; TensorBoard."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from penstock.protocols.experience import Group
from penstock.services.data import need


class Recorder:
    """Appends to the run's files, a line at a time."""

    def __init__(self, folder: Path, tensorboard: bool) -> None:
        self._metrics = (folder / "metrics.jsonl").open("a", buffering=1)
        self._actors = (folder / "actors.jsonl").open("a", buffering=1)
        self._ledger = (folder / "ledger.jsonl").open("a", buffering=1)
        self._drops = (folder / "dropped.jsonl").open("a", buffering=1)
        self._weights = (folder / "weights.jsonl").open("a", buffering=1)
        self._samples = (folder / "samples.jsonl").open("a", buffering=1)
        self._tensorboard = None
        if tensorboard:
            need("tensorboardX", "tensorboard")
            from tensorboardX import SummaryWriter

            self._tensorboard = SummaryWriter(str(folder / "tensorboard"))

    def step(self, row: dict[str, Any]) -> None:
        """One line a training step."""
        self._write(self._metrics, {"kind": "step", **row})
        self._scalars(row)

    def evaluation(self, row: dict[str, Any]) -> None:
        """One line an evaluation."""
        self._write(self._metrics, {"kind": "eval", **row})
        if row["reward"] is not None:
            self._scalars({"step": row["step"], "eval_reward": row["reward"]})

    def actors(self, members: dict[str, dict[str, Any]], queues: dict[str, int]) -> None:
        """One line a beat: what every actor does, and how deep the queues are."""
        self._write(self._actors, {"time": time.time(), "actors": members, "queues": queues})

    def ledger(self, row: dict[str, Any]) -> None:
        """One line a commit; a step that was redone has several, of which the last counts."""
        self._write(self._ledger, row)

    def drop(self, number: int, reason: str) -> None:
        """One line a dropped group."""
        self._write(self._drops, {"group": number, "reason": reason})

    def load(self, row: dict[str, Any]) -> None:
        """One line each time a rollout has loaded a version: bytes, and seconds of every phase."""
        self._write(self._weights, row)

    def sample(self, step: int, group: Group, rewards: list[float]) -> None:
        """Two trajectories of a group, the best and the worst."""
        ranked = sorted(range(len(rewards)), key=lambda i: (rewards[i] != rewards[i], rewards[i]))
        for index in dict.fromkeys((ranked[-1], ranked[0])):
            trajectory = group.trajectories[index]
            row = {
                "step": step,
                "group": group.number,
                "prompt": group.prompt.as_text(),
                "response": trajectory.text,
                "truth": group.prompt.truth if isinstance(group.prompt.truth, str) else None,
                "reward": rewards[index] if rewards[index] == rewards[index] else None,
                "versions": sorted({int(v) for v in trajectory.versions if v >= 0}),
                "finish": trajectory.finish,
            }
            self._write(self._samples, row)

    def close(self) -> None:
        """Closes the files."""
        for file in (self._metrics, self._actors, self._ledger, self._drops, self._weights, self._samples):
            file.close()
        if self._tensorboard:
            self._tensorboard.close()

    def _scalars(self, row: dict[str, Any]) -> None:
        if self._tensorboard:
            for key, value in row.items():
                if key != "step" and isinstance(value, int | float):
                    self._tensorboard.add_scalar(key, value, row["step"])

    @staticmethod
    def _write(file: Any, row: dict[str, Any]) -> None:
        file.write(json.dumps(row, default=float) + "\n")
