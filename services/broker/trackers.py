"""Metrics to trackers that people have already: TensorBoard, Weights & Biases, MLflow, trackio.

A thread of its own says it all: whatever a tracker does, whom it waits for and how it fails, the broker does not wait.
A tracker that fails is given up with a warning; the run's own files have everything.
"""

from __future__ import annotations

import hashlib
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import structlog

from penstock.services.broker.config import TrackerName

log = structlog.get_logger()

WAITING = 10_000
"""Rows that may wait for slow trackers; of more, those that come are left out."""
GIVEN_UP = object()
NOT_IN_MLFLOW = re.compile(r"[^/\w.\- ]")
"""Signs that MLflow takes in no metric's name, such as the @ of pass@4: a row with one of them is refused."""
CLOSE_S = 20.0
"""What a tracker has to send the last of it."""


@runtime_checkable
class Tracker(Protocol):
    """One of them."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of one step, by name."""

    def close(self) -> None:
        """The run is over."""


class Trackers:
    """All that the config names; ``project`` is what they file the run of ``folder`` under, ``config`` what it is made
    with."""

    def __init__(self, names: Sequence[TrackerName], folder: Path, project: str, config: Mapping[str, Any]) -> None:
        self._rows: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(WAITING)
        self._made = [(name, partial(MAKERS[name], folder, project, config)) for name in names]
        self._thread = threading.Thread(target=self._run, name="trackers", daemon=True)
        if names:
            self._thread.start()

    def log(self, row: Mapping[str, Any]) -> None:
        """The numbers of a row with its ``step``."""
        if not self._made:
            return
        values = {name: float(value) for name, value in row.items() if name != "step" and _is_number(value)}
        try:
            self._rows.put_nowait((int(row["step"]), values))
        except queue.Full:
            pass

    def close(self) -> None:
        """Sends what is left, for at most `CLOSE_S`."""
        if self._made:
            try:
                self._rows.put(None, timeout=1)
            except queue.Full:
                return
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        made = {name: self._try(name, make) for name, make in self._made}
        there = {name: tracker for name, tracker in made.items() if isinstance(tracker, Tracker)}
        while (row := self._rows.get()) is not None:
            for name, tracker in list(there.items()):
                if self._try(name, partial(tracker.log, *row)) is GIVEN_UP:
                    del there[name]
        for name, tracker in there.items():
            self._try(name, tracker.close)

    @staticmethod
    def _try(name: str, do: Callable[[], Any]) -> Any:
        try:
            return do()
        except BaseException as error:  # some end the process where they have no key
            log.warning("a tracker is given up (run.trackers)", tracker=name, error=f"{type(error).__name__}: {error}")
            return GIVEN_UP


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def run_id(folder: Path) -> str:
    """The same for the run's whole life: who resumes goes on with the same curves."""
    key, name = folder / "run.key", folder / "run.name"
    own = key.read_text() if key.is_file() else str(folder.resolve())
    called = name.read_text() if name.is_file() else folder.name
    return f"{called}-{hashlib.sha256(own.encode()).hexdigest()[:8]}"


class _TensorBoard:
    def __init__(self, folder: Path, _project: str, _config: Mapping[str, Any]) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """https://docs.wandb.ai/ref/python/init. Its environment says where to and as whom: WANDB_API_KEY, WANDB_MODE."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=project, name=folder.name, id=run_id(folder), resume="allow", dir=str(folder), config=dict(config)
        )

        self._run.define_metric("step")  # of our own: an evaluation comes later than the step that it is of
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """MLFLOW_TRACKING_URI says where to; a database in the run's folder otherwise."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{folder.resolve()}/mlflow.db")
        self._client = MlflowClient(uri, uri)
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self._client.create_experiment(project)
        known = self._client.search_runs([experiment], f"tags.penstock = '{run_id(folder)}'")
        if known:
            self._id = known[0].info.run_id
            return
        self._id = self._client.create_run(
            experiment, run_name=folder.name, tags={"penstock": run_id(folder)}
        ).info.run_id
        params = [Param(key, str(value)[:500]) for key, value in _flat(config).items()]
        for first in range(0, len(params), 100):
            self._client.log_batch(self._id, params=params[first : first + 100])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        named = {NOT_IN_MLFLOW.sub("-", name): value for name, value in values.items()}
        self._client.log_batch(self._id, [self._metric(name, value, now, step) for name, value in named.items()])

    def close(self) -> None:
        self._client.set_terminated(self._id)


class _Trackio:
    """https://huggingface.co/docs/trackio. TRACKIO_SPACE_ID or TRACKIO_SERVER_URL say where to; else it is local."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        import trackio

        self._run = trackio.init(project=project, name=run_id(folder), resume="allow", config=_flat(config))
        self._finish = trackio.finish

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._finish()


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"gate": {"max_lag": 2}}`` as ``{"gate.max_lag": 2}``."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return found


MAKERS: dict[TrackerName, Callable[[Path, str, Mapping[str, Any]], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _MLflow,
    "trackio": _Trackio,
}
PACKAGES: dict[TrackerName, str] = {
    "tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio",
}  # fmt: skip
"""What each is imported as; the extra has the tracker's own name."""
