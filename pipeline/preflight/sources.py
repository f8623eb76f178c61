"""Sources that rows name, where a config cannot say which there are; and what a filter does not look at."""

from __future__ import annotations

from penstock.pipeline.config import Config
from penstock.pipeline.config.sources import OTHER, sources_of
from penstock.pipeline.preflight.report import Report


def look(config: Config, report: Report) -> None:
    """Adds to ``report`` what is found; of a run whose scorers are asked for every prompt, nothing is."""
    if not config.columns.by_source:
        return
    named = sources_of(config.prompts.train)
    trained = sorted(report.trained if OTHER in named else named)
    if OTHER in named:
        _look_at_rows(config, trained, report)
    column = config.columns.by_name.get(config.replay.filter.column) if config.replay.filter.type != "none" else None
    kept = [source for source in trained if column and not column.asked(source)]
    if column and kept:
        report.notes.append(
            f"replay.filter.column: {column.name} is not asked for the sources {', '.join(map(repr, kept))}, whose "
            "groups are all kept"
        )


def _look_at_rows(config: Config, trained: list[str], report: Report) -> None:
    for source in trained:
        if not config.columns.judged(source):
            report.problems.append(
                f"prompts.train: no reward is made for rows of the source {source!r}, of which there is one among the "
                "first; name it in reward.functions.N.sources, or ask a function with a weight for all (sources: [])"
            )
    for column in config.columns.columns:
        if unseen := [source for source in column.sources if source not in report.rows]:
            report.notes.append(
                f"{column.name}: it is asked for the sources {', '.join(map(repr, unseen))}, which none of the first "
                "rows is of"
            )
