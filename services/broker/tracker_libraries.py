"""Trackers that people have already: TensorBoard, Weights & Biases, MLflow, trackio, SwanLab.

Each takes the numbers of a step, and tables of texts: a table's first column is the step that all its rows are of, and
a column has one type, in every table of its name. None is imported before it is asked for.
"""

from __future__ import annotations

import hashlib
import os
import re
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Columns = Sequence[str]
Rows = Sequence[Sequence[Any]]

NOT_IN_MLFLOW = re.compile(r"[^/\w.\- ]")
"""Signs that MLflow takes in no metric's name, such as the @ of pass@4: a row with one of them is refused."""
STEPS = 100
"""Whose rows stand in one table, where more would be too many for a tracker."""
TEXTS = ("prompt", "response")
"""Columns that are read, not compared."""


def run_id(folder: Path) -> str:
    """The same for the run's whole life: who resumes goes on with the same curves. A copy of its folder has others."""
    key, name, copy = folder / "run.key", folder / "run.name", folder / "run.copy"
    own = key.read_text() if key.is_file() else str(folder.resolve())
    own += copy.read_text() if copy.is_file() else ""
    called = name.read_text() if name.is_file() else folder.name
    return f"{called}-{hashlib.sha256(own.encode()).hexdigest()[:8]}"


class _TensorBoard:
    """Its text tab has a slider over steps, of which it shows ten, or as many as ``--samples_per_plugin text=1000``."""

    def __init__(self, folder: Path, _project: str, _config: Mapping[str, Any]) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # else it keeps two minutes of them to itself, which nobody would tell it again

    def table(self, name: str, columns: Columns, rows: Rows) -> None:
        self._writer.add_text(name, as_markdown(columns, rows), _step(rows))

    def close(self, _error: str | None) -> None:
        self._writer.close()


class _Wandb:
    """https://docs.wandb.ai/ref/python/init. Its environment says where to and as whom: WANDB_API_KEY, WANDB_MODE.

    Of what is logged under one name its page shows the last table; of an incremental table the rows of its last 100
    logs, and each log names all before it. So there is such a table for each 100 steps.
    """

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        import wandb

        self._new_table, self._shown = wandb.Table, ""
        self._table: Any = None
        self._run = wandb.init(
            project=project, name=folder.name, id=run_id(folder), resume="allow", dir=str(folder), config=dict(config)
        )

        self._run.define_metric("step")  # of our own: an evaluation comes later than the step that it is of
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def table(self, name: str, columns: Columns, rows: Rows) -> None:
        first = _step(rows) // STEPS * STEPS
        shown = f"{name}/{first}-{first + STEPS - 1}"
        if shown != self._shown:
            types = [type(value) for value in rows[0]]
            self._table = self._new_table(columns=list(columns), dtype=types, log_mode="INCREMENTAL")
            self._shown = shown
        for row in rows:
            self._table.add_data(*(None if value != value else value for value in row))  # JSON has no NaN
        self._run.log({"step": _step(rows), shown: self._table})

    def close(self, error: str | None) -> None:
        self._run.finish(exit_code=1 if error else 0)


class _MLflow:
    """MLFLOW_TRACKING_URI says where to; a database in the run's folder otherwise.

    A table is a file, which is read and written anew whenever rows are added; and the names of all of a run's are in
    one tag, of 8,000 letters. So there is one for each 100 steps, or for more where a run has very many.
    """

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # a bar for each table, in the log
        self._steps = max(STEPS, -(-int(config.get("trainer", {}).get("steps", 0)) // STEPS))
        elsewhere = os.environ.get("MLFLOW_TRACKING_URI")
        uri = elsewhere or f"sqlite:///{folder.resolve()}/mlflow.db"
        files = None if elsewhere else f"{folder.resolve().as_uri()}/mlflow"
        self._client = MlflowClient(uri, uri)
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self._client.create_experiment(project, files)
        known = self._client.search_runs([experiment], f"tags.penstock = '{run_id(folder)}'")
        if known:
            self._id = known[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")  # it had ended
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

    def table(self, name: str, columns: Columns, rows: Rows) -> None:
        first = _step(rows) // self._steps * self._steps
        by_column = {column: [row[place] for row in rows] for place, column in enumerate(columns)}
        self._client.log_table(self._id, by_column, f"{name}/from-step-{first:06d}.json")

    def close(self, error: str | None) -> None:
        self._client.set_terminated(self._id, "FAILED" if error else "FINISHED")


class _Trackio:
    """https://huggingface.co/docs/trackio. TRACKIO_SPACE_ID or TRACKIO_SERVER_URL say where to; else it is local. Its
    page for tables has a slider over the steps."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        import trackio

        self._run = trackio.init(project=project, name=run_id(folder), resume="allow", config=_flat(config))
        self._finish, self._table = trackio.finish, trackio.Table

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def table(self, name: str, columns: Columns, rows: Rows) -> None:
        named: list[Any] = [dict(zip(columns, row, strict=True)) for row in rows]
        self._run.log({name: self._table(data=named)}, step=_step(rows))

    def close(self, _error: str | None) -> None:
        self._finish()


class _SwanLab:
    """https://docs.swanlab.cn/en/api/py-init.html. SWANLAB_API_KEY and SWANLAB_MODE say as whom and where to; what is
    not sent lies in the run's folder. A table is shown with a slider over its steps."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        import swanlab

        self._table = swanlab.echarts.Table
        self._run = swanlab.init(
            project=project, name=folder.name, id=run_id(folder), resume="allow", log_dir=str(folder / "swanlab"),
            config=_flat(config), settings=swanlab.Settings(interactive=False),
        )  # fmt: skip

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def table(self, name: str, columns: Columns, rows: Rows) -> None:
        self._run.log({name: self._table().add(list(columns), [list(row) for row in rows])}, step=_step(rows))

    def close(self, error: str | None) -> None:
        self._run.finish(**({"state": "crashed", "error": error} if error else {}))


def _step(rows: Rows) -> int:
    """All rows of a table are of one, which their first column says."""
    return int(rows[0][0])


def as_markdown(columns: Columns, rows: Rows) -> str:
    """Rows for people, one below the other: their numbers in a line, their texts as they are, in blocks of code, since
    what a model writes is no Markdown of ours."""
    parts = []
    for row in rows:
        named = dict(zip(columns, row, strict=True))
        texts = {name: value for name, value in named.items() if name in TEXTS}
        parts.append(", ".join(f"{name} **{_shown(value)}**" for name, value in named.items() if name not in texts))
        parts += [f"{name}:\n\n" + textwrap.indent(str(text), "    ", lambda _: True) for name, text in texts.items()]
    return "\n\n".join(parts)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"gate": {"max_lag": 2}}`` as ``{"gate.max_lag": 2}``."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return found


MAKERS: dict[str, Callable[[Path, str, Mapping[str, Any]], Any]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _MLflow,
    "trackio": _Trackio,
    "swanlab": _SwanLab,
}
PACKAGES: dict[str, str] = {
    "tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio",
    "swanlab": "swanlab",
}  # fmt: skip
"""What each is imported as; the extra has the tracker's own name."""
