"""Scorers that are asked for some sources of prompts alone: whether these are there, and what each prompt lacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from penstock.protocols.columns import ColumnTable
from penstock.services.data.config import DataConfig, MixData, says_sources
from penstock.services.reward.config import ENVIRONMENT
from penstock.services.runtime.nearest import nearest
from penstock.services.trainer.advantage_config import DistillationAdvantage, GdpoAdvantage, NoAdvantage

OTHER = "\0"
"""In place of a name that only a row of a custom source says; nobody would give it to a scorer's `sources`."""


def check_sources(config: Any) -> None:
    """Raises `ValueError` where a scorer names a source that there is not, where prompts of one have no reward, or
    where something that is read of a prompt is not there."""
    table: ColumnTable = config.columns
    if not table.by_source and not config.rollout.environments:
        return
    places = places_of(config)
    trained = places["prompts.train"]
    if not any(OTHER in sources for sources in places.values()):
        for words in unknown_names(config, places):
            raise ValueError(words)
    if not config.prompts.eval_size:  # the sets are named, and nobody is asked them
        places = {"prompts.train": trained}
    for key, sources in places.items():
        for source in sources:
            _check_judged(table, key, source)
            _check_played(config, key, source)
    for key, column in _learned_from(config):
        if lacking := _lacking(table, column, trained):
            raise ValueError(
                f"{key}: {column} is not asked for {_said(lacking)}, and what is learned from is needed of every "
                "prompt of prompts.train; ask it for all"
            )
    _check_teachers(config, trained)
    everywhere = [source for sources in places.values() for source in sources]
    for index, function in enumerate(config.reward.functions):
        _check_reads(table, f"reward.functions.{index}.columns", function.columns, function.sources or everywhere)
    for kind, scorer in config.scorers.items():
        asked = everywhere if kind in {column.scorer for column in table.evaluated} else trained
        _check_reads(table, f"scorers.{kind}.reads", scorer.reads, scorer.sources or asked)


def sources_of(data: DataConfig) -> list[str]:
    """Which `Prompt.source` the rows of ``data`` may have; `OTHER` where a row says it."""
    if isinstance(data, MixData):
        named = [name for name in data.sources if name not in data.named_by_rows]
        return [*named, OTHER] if data.named_by_rows else named
    return [OTHER] if says_sources(data) else [""]


def places_of(config: Any) -> dict[str, list[str]]:
    """By key, which sources the rows of the training data and of each evaluation set count to; as `sources_of`."""
    prompts = config.prompts
    places = {"prompts.train": sources_of(prompts.train)}
    for name, data in prompts.eval.items():
        places[f"prompts.eval.{name}"] = [source or name for source in sources_of(data)]
    return places


def unknown_names(config: Any, places: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Words about each name in a scorer's `sources`, or of an environment's, that is in none of ``places``."""
    known = {source: key for key, sources in places.items() for source in sources if source not in ("", OTHER)}
    asked = [(f"reward.functions.{i}.sources", f.sources) for i, f in enumerate(config.reward.functions)]
    asked += [(f"scorers.{kind}.sources", scorer.sources) for kind, scorer in config.scorers.items()]
    asked += [("rollout.environments", list(config.rollout.environments))]
    there = ", ".join(f"{source} ({key})" for source, key in known.items()) or "none, since prompts.train is no mixture"
    for key, names in asked:
        for name in names:
            if name not in known:
                yield f"{key}: no prompt is of a source {name!r}; {nearest(name, known, f'there are {there}')}"


def _check_judged(table: ColumnTable, key: str, source: str) -> None:
    if source == OTHER or table.judged(source, key != "prompts.train"):
        return
    raise ValueError(
        f"{key}: no reward is made for {_said([source])}: every reward function with a weight is asked for other "
        "sources alone; name it in reward.functions.N.sources, or ask one of them for all (sources: [])"
    )


def _check_played(config: Any, key: str, source: str) -> None:
    """What an environment gave is asked for where there is one."""
    if source == OTHER or config.gateway.count or config.rollout.environment_of(source):
        return
    for index, function in enumerate(config.reward.functions):
        if function.function == ENVIRONMENT and (not function.sources or source in function.sources):
            raise ValueError(
                f"reward.functions.{index}: environment stands for what an environment gave, and {_said([source])} of "
                f"{key} is played in none; name in its sources those that are, e.g. "
                f"sources: [{', '.join(config.rollout.environments)}]"
            )


def _learned_from(config: Any) -> Iterator[tuple[str, str]]:
    """What a step computes with, by key; of teachers see `_check_teachers`."""
    algorithm = config.trainer.algorithm
    for choice in ("advantage", "loss", "correction"):
        chosen = getattr(algorithm, choice)
        if not isinstance(chosen, DistillationAdvantage):
            key = "components" if isinstance(chosen, GdpoAdvantage) else "columns"
            yield from ((f"trainer.algorithm.{choice}.{key}", name) for name in chosen.columns)
    for index, constraint in enumerate(algorithm.constraints):
        yield f"trainer.algorithm.constraints.{index}.column", constraint.column


def _check_teachers(config: Any, trained: Sequence[str]) -> None:
    """Where nothing else is learned from, each source has one."""
    algorithm, by_name = config.trainer.algorithm, config.columns.by_name
    advantage = algorithm.advantage
    if isinstance(advantage, DistillationAdvantage):
        key, teachers = "advantage", [name for name, weight in advantage.teachers.items() if weight]
    elif isinstance(advantage, NoAdvantage) and (algorithm.distill or algorithm.teacher_advantage):
        said = {"distill": algorithm.distill, "teacher_advantage": algorithm.teacher_advantage}
        key = "distill" if algorithm.distill else "teacher_advantage"
        teachers = [name for term in said.values() if term for name in term.teachers]
    else:
        return
    untaught = [s for s in trained if not any(by_name[name].asked(s) for name in teachers)]
    if untaught:
        raise ValueError(f"trainer.algorithm.{key}.teachers: none of them is asked for {_said(untaught)}")


def _check_reads(table: ColumnTable, key: str, names: Sequence[str], sources: Sequence[str]) -> None:
    for name in names:
        if lacking := _lacking(table, name, sources):
            raise ValueError(
                f"{key}: {name} is not asked for {_said(lacking)}, and its reader is; give the reader no more "
                "sources than that has"
            )


def _lacking(table: ColumnTable, name: str, sources: Sequence[str]) -> list[str]:
    """Those of ``sources`` whose prompts have no such column."""
    column = table.by_name.get(name)
    return [source for source in sources if column and not column.asked(source)]


def _said(sources: Sequence[str]) -> str:
    words = {"": "rows without a source (prompts.train is no mixture)", OTHER: "whatever source a row may name"}
    return ", ".join(words.get(source, f"the source {source!r}") for source in dict.fromkeys(sources))
