"""Puts the report together from the run's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog
from jinja2 import Environment, PackageLoader

from penstock.pipeline.config import Config, dump
from penstock.pipeline.run.summary import read_lines, steps_of
from penstock.services.runtime.install import install

log = structlog.get_logger()

SAMPLES = 24
BEATS = 600
"""Points on the plots over time, at most."""


def write_report(folder: Path, config: Config, summary: dict[str, Any]) -> Path | None:
    """Writes ``report.html`` into the run's folder; None where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        log.warning("no report: matplotlib is not installed; run: " + install("report"))
        return None
    from penstock.pipeline.report import plots

    steps = steps_of(folder)
    rows = read_lines(folder / "metrics.jsonl")
    evaluations = [row for row in rows if row["kind"] == "eval"]
    beats = read_lines(folder / "actors.jsonl")
    beats = beats[:: max(1, len(beats) // BEATS)]
    loads = read_lines(folder / "weights.jsonl")
    figures = {}
    if steps:
        figures["Reward"] = plots.reward(steps, evaluations)
        figures["Learning"] = plots.learning(steps)
        columns = [name for name in config.columns.by_name if any(name in row for row in steps)]
        if len(columns) > 1:
            figures["Columns, mean of each step"] = plots.columns(steps, columns)
        figures["Lag of the trained tokens"] = plots.lag(steps)
        figures["Engines' log-probabilities beside the trainer's"] = plots.mismatch(steps)
        figures["How long scorers take"] = plots.latency(steps)
    if loads:
        figures["Pause of generation for each version"] = plots.pauses(loads)
        figures["Where a version's time goes"] = plots.phases(loads)
    if beats:
        figures["Throughput"] = plots.throughput(beats)
        figures["Busy and idle"] = plots.busy(beats)
        figures["Queues"] = plots.queues(beats)
    environment = Environment(loader=PackageLoader("penstock.pipeline", "report"), autoescape=True)
    page = environment.get_template("report.html.j2").render(
        run=folder.name,
        summary=summary,
        figures=figures,
        sets=sorted({name for means in summary["evaluations"].values() for name in means}),
        samples=some_samples(folder / "samples.jsonl"),
        config=dump(config),
    )
    path = folder / "report.html"
    path.write_text(page)
    return path


def some_samples(path: Path) -> list[dict[str, Any]]:
    """About `SAMPLES` rows of a file that may hold every trajectory of a run, evenly over all of it, with a text of
    their rewards."""
    if not path.is_file():
        return []
    with path.open() as lines:
        count = sum(1 for _ in lines)
    found = read_lines(path, every=max(1, count // SAMPLES))
    for row in found:
        parts = {name.removeprefix("reward/"): row[name] for name in row if name.startswith("reward/")}
        alone = "" if len(parts) < 2 else f" ({', '.join(f'{name} {_number(part)}' for name, part in parts.items())})"
        row["rewards"] = _number(row.get("reward")) + alone
    return found


def _number(value: float | None) -> str:
    return "failed" if value is None else f"{value:.3g}"
