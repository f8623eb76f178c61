"""Sources that rows name, where a config cannot say which there are; and what a filter does not look at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.pipeline.config import Config
from penstock.pipeline.config.sources import OTHER, places_of, unknown_names
from penstock.pipeline.preflight.report import Report


def look(config: Config, report: Report) -> None:
    """Adds to ``report`` what is found; of a run whose scorers are asked for every prompt, nothing is."""
    if not config.columns.by_source and not config.rollout.environments:
        return
    places = places_of(config)
    named = places["prompts.train"]
    trained = sorted(report.trained if OTHER in named else named)
    seen = {"prompts.train": trained} | {f"prompts.eval.{name}": found for name, found in report.evaluated.items()}
    _look_at_names(config, places, seen, report)
    _look_at_rows(config, places, seen, report)
    column = config.columns.by_name.get(config.replay.filter.column) if config.replay.filter.type != "none" else None
    kept = [source for source in trained if column and not column.asked(source)]
    if column and kept:
        report.notes.append(
            f"replay.filter.column: {column.name} is not asked for the sources {', '.join(map(repr, kept))}, whose "
            "groups are all kept"
        )


def _look_at_names(
    config: Config, places: dict[str, list[str]], seen: Mapping[str, Iterable[str]], report: Report
) -> None:
    """Names that a config alone cannot check. Of training data only the first rows are read, and others may come."""
    known = {key: [*named, *seen.get(key, ())] for key, named in places.items()}
    if all(OTHER not in named or (key in seen and key != "prompts.train") for key, named in places.items()):
        report.problems += unknown_names(config, known)
        return
    names = {name for found in known.values() for name in found}
    if unseen := [source for source in config.rollout.environments if source not in names]:
        report.notes.append(f"rollout.environments: none of the first rows is of {', '.join(map(repr, unseen))}")
    for column in config.columns.columns:
        if unseen := [source for source in column.sources if source not in names]:
            report.notes.append(
                f"{column.name}: it is asked for the sources {', '.join(map(repr, unseen))}, which none of the first "
                "rows is of"
            )


def _look_at_rows(
    config: Config, places: dict[str, list[str]], seen: Mapping[str, Iterable[str]], report: Report
) -> None:
    """Sources that only rows name."""
    for key, found in seen.items():
        for source in sorted(found) if OTHER in places[key] else []:
            if not config.columns.judged(source, key != "prompts.train"):
                report.problems.append(
                    f"{key}: no reward is made for rows of the source {source!r}, of which there is one among the "
                    "first; name it in reward.functions.N.sources, or ask a function with a weight for all "
                    "(sources: [])"
                )
