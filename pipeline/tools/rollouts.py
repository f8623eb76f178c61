"""`penstock rollouts`: what a run trained on, out of its archive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from penstock.pipeline.config import ConfigError, load
from penstock.pipeline.run.summary import check_run
from penstock.pipeline.tools.arguments import warn
from penstock.protocols.columns import ColumnTable, top_of
from penstock.protocols.experience import ExperienceError, Group
from penstock.protocols.messages import Batch
from penstock.protocols.wire import WireError
from penstock.services.broker import archive
from penstock.services.broker.samples import by_trajectory, rows
from penstock.services.broker.seen import keep


def rollouts(run: str | Path, step: int | None = None) -> Iterator[dict[str, Any]]:
    """Every trajectory of the archived steps of the run in the folder ``run``, or of one ``step``: a flat row each.
    Raises `ConfigError` where there is no archive.

        pandas.DataFrame(penstock.rollouts("runs/first-try"))
    """
    table, groups = archived(run, step)
    for number, group, columns in groups:
        found = rows(number, group, by_trajectory(group, columns, of_tokens(group, columns, table)))
        for row, trajectory in zip(found, group.trajectories, strict=True):
            yield row | ({"turns": list(trajectory.turns)} if trajectory.turns else {})


def archived(
    run: str | Path, step: int | None = None
) -> tuple[ColumnTable, Iterator[tuple[int, Group, dict[str, np.ndarray]]]]:
    """The run's columns as it went on last, and of every archived group, or those of one ``step``: its step, itself and
    its columns; pictures that it shows become files of the run's folder, which rows name. Groups that cannot be read
    are left out, and counted at the end. Raises `ConfigError` where there is no archive."""
    folder = Path(run)
    check_archive(folder, step)

    def groups() -> Iterator[tuple[int, Group, dict[str, np.ndarray]]]:
        unreadable = 0
        for batch in batches(folder, step):
            unreadable += len(batch.groups)
            for group, columns in readable(batch):
                unreadable -= 1
                with suppress(OSError):  # another's folder, say: rows name them all the same
                    keep(folder, (picture for trajectory in group.trajectories for picture in trajectory.pictures))
                yield batch.step, group, columns
        if unreadable:
            warn(f"groups of {folder} that cannot be read, and are left out: {unreadable}")

    return load(folder / "config.yaml").columns, groups()


def batches(folder: Path, step: int | None, unread: Callable[[str], None] = warn) -> Iterator[Batch]:
    """The archived steps of the run in ``folder``, or one ``step``. Those whose file cannot be read are left out, which
    ``unread`` is told; of the one raises `ArchiveError`."""
    if step is None:
        yield from (batch for batch, _ in archive.read(folder, unread=unread))
    elif (found := archive.read_step(folder, step)) is not None:
        yield found[0]


def check_archive(folder: Path, step: int | None) -> None:
    """Raises `ConfigError` where ``folder`` is no run's, or its run has no archive, or none of ``step``."""
    check_run(folder)
    kept, config = archive.steps(folder), load(folder / "config.yaml")
    wanted = config.replay.archive not in ("none", 0)
    soon = f"steps come there with the next checkpoint (trainer.checkpoint.every={config.trainer.checkpoint.every})"
    if not kept and wanted:
        samples = "; samples.jsonl has some now" if config.replay.samples else ""
        raise ConfigError(f"RUN: {folder} has no archived step yet: {soon}{samples}")
    if not kept:
        raise ConfigError(
            f"RUN: {folder} has no archive; before the run, set replay.archive=all, or to the last N steps"
        )
    if step is not None and step not in kept:
        later = f"; later {soon}" if wanted and max(kept) < step < config.trainer.counted_steps else ""
        raise ConfigError(f"--step: {step} is not in the archive; it has steps {min(kept)} to {max(kept)}{later}")


def readable(batch: Batch) -> Iterator[tuple[Group, dict[str, np.ndarray]]]:
    """Those groups of an archived ``batch`` that can be read, with their columns, but for what teachers say of tokens
    that were not sampled: nobody reads millions of them."""
    for taken in batch.groups:
        try:
            yield archive.open_group(taken), {n: v for n, v in taken.columns.items() if top_of(n) is None}
        except (ExperienceError, WireError):
            continue


def of_tokens(group: Group, columns: Mapping[str, np.ndarray], table: ColumnTable) -> set[str]:
    """Those ``columns`` of ``group`` that have a value for each token, as their lengths say: ``table``, of the run as
    it went on last, need not have what an earlier step was trained with, and is asked where both lengths are one."""
    size = len(group.trajectories)
    same = size == sum(len(trajectory.tokens) for trajectory in group.trajectories)
    return table.by_token & columns.keys() if same else {name for name, v in columns.items() if len(v) != size}


def by_token_values(
    group: Group, columns: Mapping[str, np.ndarray], names: Iterable[str], made: Mapping[str, Sequence[np.ndarray]]
) -> list[dict[str, np.ndarray]]:
    """Of each trajectory of ``group``: ``[tokens]`` of those of its ``columns`` that have a value for each token, whose
    ``names`` are given, and of what the trainer ``made`` of it, see `judged.read`; a column goes before."""
    ends = np.cumsum([len(trajectory.tokens) for trajectory in group.trajectories])[:-1]
    parts = {name: np.split(columns[name], ends) for name in names if name in columns}
    found = [{name: each[number] for name, each in parts.items()} for number in range(len(group.trajectories))]
    learned = [each for each, trajectory in zip(found, group.trajectories, strict=True) if not trajectory.greedy]
    shapes = [(len(trajectory.tokens),) for trajectory in group.trajectories if not trajectory.greedy]
    for name, several in made.items():
        if list(map(np.shape, several)) == shapes:  # else it is of another life of the step
            for each, values in zip(learned, several, strict=True):
                each.setdefault(name, values)
    return found
