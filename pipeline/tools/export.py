"""A run's archive as one parquet file, a row for each trajectory, with its tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from penstock.pipeline.config import ConfigError
from penstock.pipeline.tools.output import output
from penstock.pipeline.tools.rollouts import archived, batches, by_token_values, of_tokens, readable
from penstock.protocols.columns import ColumnTable, top_of
from penstock.protocols.experience import Group
from penstock.services.broker.samples import rows
from penstock.services.data import need
from penstock.services.trainer import judged

FIXED = {
    "step": "int32", "group": "int64", "sample": "int32", "session": "int32", "source": "string", "prompt": "string",
    "response": "string", "truth": "string", "tokens": "int32", "finish": "string", "version_min": "int32",
    "version_max": "int32",
}  # fmt: skip
"""Columns that every file has, with pyarrow's names of their types. ``truth`` is text, or JSON of what else it is."""
TOKENS = {"token_ids": "int32", "loss_mask": "uint8", "logprobs": "float32", "versions": "int32"}
"""Lists with one element for each token of the prompt and the answer."""


def export(run: str | Path, file: Path, step: int | None = None) -> int:
    """Writes what `rollouts` yields, and each trajectory's tokens, to ``file``; returns the number of rows. Beside the
    fixed columns there is a float64 for each column of the experience that has a value for each trajectory, a list of
    float32 for each that has one for each token (of teachers none of `columns.top_columns`), ``metrics``, JSON of what
    agents have measured, and ``pictures``, names of files in the run's folder; ``trainer_logprobs`` and ``advantages``
    are null where the trainer has a disk of its own. Raises `ConfigError` where there is no archive, or ``file`` cannot
    be written."""
    need("pyarrow", "data", "--export")
    import pyarrow as pa
    import pyarrow.parquet as pq

    table, steps = archived(run, step)
    columns = _columns(Path(run), step, table) | dict.fromkeys(judged.NAMES, True)
    schema = pa.schema(
        [
            *((name, pa.type_for_alias(kind)) for name, kind in FIXED.items()),
            *((name, pa.list_(pa.type_for_alias(kind))) for name, kind in TOKENS.items()),
            *((name, pa.float64()) for name in columns if not columns[name]),
            *((name, pa.list_(pa.float32())) for name in columns if columns[name]),
            ("metrics", pa.string()),
            ("pictures", pa.list_(pa.string())),
        ]
    )
    written = 0
    with output(file, "--export") as whole:
        aside = whole.with_name(f".{whole.name}.partial")
        try:
            with pq.ParquetWriter(aside, schema, compression="zstd") as writer:
                for number, several in groupby(steps, key=lambda each: each[0]):  # a row group of the file is a step
                    made = judged.read(Path(run) / "archive", number)
                    found = [row for _, group, of in several for row in _rows(number, group, of, table, made)]
                    writer.write_table(pa.Table.from_pylist(found, schema))
                    written += len(found)
            aside.rename(whole)
        finally:
            aside.unlink(missing_ok=True)
    return written


def _columns(run: Path, step: int | None, table: ColumnTable) -> dict[str, bool]:
    """Whether a column has a value for each token, by its name: of those of ``table``, and of what else the archive
    has. Raises `ConfigError` where one has in some steps, and in others not."""
    found: dict[str, bool] = {}
    for batch in batches(run, step, lambda _: None):  # what is left out is said when it is written
        for group, columns in readable(batch):
            by_token = of_tokens(group, columns, table)
            for name in columns:
                if found.setdefault(name, name in by_token) != (name in by_token):
                    raise ConfigError(
                        f"--export: {name} has a value for each token in some steps, and for each trajectory in "
                        "others; export a step alone, with --step"
                    )
    return {name: name in table.by_token for name in table.names if top_of(name) is None} | found


def _rows(
    step: int, group: Group, columns: dict[str, np.ndarray], table: ColumnTable, made: judged.Judged
) -> Iterator[dict[str, Any]]:
    names = of_tokens(group, columns, table)
    values = by_token_values(group, columns, names, made.get(group.number, {}))
    flat = rows(step, group, {name: each for name, each in columns.items() if name not in names})
    for row, trajectory, by_token in zip(flat, group.trajectories, values, strict=True):
        truth = row["truth"]
        yield row | {
            "truth": truth if truth is None or isinstance(truth, str) else json.dumps(truth),
            "token_ids": trajectory.tokens,
            "loss_mask": trajectory.loss_mask,
            "logprobs": trajectory.logprobs,
            "versions": trajectory.versions,
            **by_token,
            "metrics": json.dumps(trajectory.metrics),
        }
