"""`penstock rollback`: a run as it was at an earlier checkpoint, to go on from there with other settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.pipeline.config import Config, ConfigError, load
from penstock.pipeline.config.passwords import hide_password
from penstock.pipeline.run.lock import held, is_at_work
from penstock.protocols.run_lock import holder
from penstock.services.runtime.checkpoint_folders import (
    MIXTURES,
    ROLLED_BACK,
    TAIL_STEPS,
    path_of,
    versions,
    without_optimizer,
)
from penstock.services.runtime.files import write_whole
from penstock.services.runtime.lines import each_line, line_of

STEPS = ("metrics.jsonl", "ledger.jsonl", "samples.jsonl", "critic.jsonl", "eval_samples.jsonl")
"""Files of a line for each step or version, or several."""
WHOLE = ("redis", "summary.json", "report.html")
"""What speaks of the run as it has come to be."""


def rollback(
    run: Annotated[Path, typer.Argument(help="The run's folder, e.g. runs/first-try.", show_default=False)],
    version: Annotated[int, typer.Argument(help="A version with a checkpoint, e.g. 100.", show_default=False)],
    new_store: Annotated[
        bool,
        typer.Option(
            "--new-store",
            help="Of a run whose store is not in its folder (store.url, PENSTOCK_STORE, containers): it goes on with "
            "another one, or with this one emptied.",
        ),
    ] = False,
) -> None:
    """Take a run back to the checkpoint of VERSION: later checkpoints, its store and what its files say of later
    steps are set aside, below RUN/set-aside. Then --resume goes on from there, with the optimizer and the place in the
    data as they were, and with other settings where you give some. What its filters had left out of the last steps is
    asked again, and a curriculum begins anew.

    For instance: penstock rollback runs/first-try 100
    then: penstock run --resume runs/first-try trainer.optimizer.lr=5.0e-7
    """
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"RUN: {run} is no run's folder: it has no config.yaml")
    there = versions(run / "checkpoints")
    if version not in there:
        has = ", ".join(map(str, there)) or "none"
        raise ConfigError(f"VERSION: {run} has no checkpoint of version {version}; it has {has}")
    if without_optimizer(run / "checkpoints", version):
        whole = [each for each in there if not without_optimizer(run / "checkpoints", each)]
        raise ConfigError(
            f"VERSION: the checkpoint of version {version} has the model alone (trainer.checkpoint.keep_optimizer): a "
            f"new run begins with it by model.path={path_of(run / 'checkpoints', version)}; the run can be taken back "
            f"to {', '.join(map(str, whole)) or 'none'}"
        )
    config = load(run / "config.yaml")
    _check_reference(run, version, config)
    critics = _critic_at(run, version) if config.with_critic else version
    if not new_store and (config.store.url or _has_its_store_elsewhere(run)):
        where = hide_password(config.store.url or "PENSTOCK_STORE")
        raise ConfigError(
            f"RUN: the store of {run} is not in its folder ({where}), and knows of later steps: stop all of the run, "
            "and empty it (redis-cli -u URL FLUSHDB; with docker compose: docker compose down, docker volume rm of the "
            "volume redis), or give the run another one when it goes on; then say so here with --new-store"
        )
    if holder(run) is not None or is_at_work(run):
        raise ConfigError(f"RUN: the run in {run} is going on: stop it first")
    with held(run):
        aside = run / "set-aside" / f"{time.strftime('%Y%m%d-%H%M%S')}-back-to-{version}"
        aside.mkdir(parents=True)
        for path in _later(run, version):
            to = aside / path.relative_to(run)
            to.parent.mkdir(parents=True, exist_ok=True)
            path.rename(to)
        for name in STEPS:
            _cut(run / name, aside / name, lambda row: _stays(row, version))
        _cut_groups(run, aside)
        write_whole(run / ROLLED_BACK, f"{version}\n")
    typer.echo(f"back at version {version}; what was later is in {aside}")
    if critics < version:
        typer.echo(f"the critic goes on as it was at version {critics}: it has no checkpoint nearer to that")
    typer.echo(f"go on: penstock run --resume {run}")


def _has_its_store_elsewhere(run: Path) -> bool:
    """It has a ledger, and neither a store of its own nor one that was set aside before."""
    private = (run / "redis").exists() or any(True for _ in (run / "set-aside").glob("*/redis"))
    return not private and any(True for _ in each_line(run / "ledger.jsonl"))


def _check_reference(run: Path, version: int, config: Config) -> None:
    """Raises `ConfigError` where a reference that moves part of the way is not kept as it was at ``version``, nor what
    it would be made of."""
    every = config.reference.refresh_every
    if config.reference.mix == 1:
        taken = version // every * every if every else 0
        if taken and taken not in (kept := versions(run / "checkpoints")):
            may = ", ".join(str(each) for each in kept if each // every * every in (0, *kept)) or "none"
            raise ConfigError(
                f"VERSION: with reference.refresh_every={every} the reference of version {version} is that of {taken}, "
                f"which is not kept any more; versions with theirs: {may}"
            )
        return
    there = {folder: versions(run / folder) for folder in ("checkpoints", MIXTURES)}
    made = max((each for each in there[MIXTURES] if each <= version), default=0)
    if lacking := [
        due for due in range((made // every + 1) * every, version + 1, every) if due not in there["checkpoints"]
    ]:
        has = ", ".join(map(str, there[MIXTURES])) or "none"
        raise ConfigError(
            f"VERSION: with reference.mix the reference of version {version} is made of that of {lacking[0]}, which is "
            f"not kept any more; take a later version: the reference has {has}"
        )


def _critic_at(run: Path, version: int) -> int:
    """The critic's version to go on with. Raises `ConfigError` where it has none that is near enough: without its own
    it would begin anew, beside a policy that has learned."""
    folder = run / "critic" / "checkpoints"
    every = [each for each in versions(folder) if not without_optimizer(folder, each)]
    there = [each for each in every if version - TAIL_STEPS < each <= version]
    if not there:
        has = ", ".join(map(str, every)) or "none"
        raise ConfigError(
            f"VERSION: the critic has no checkpoint of version {version}, nor of the {TAIL_STEPS} steps before; it has "
            f"{has}"
        )
    return there[-1]


def _later(run: Path, version: int) -> Iterator[Path]:
    """What is set aside as it is."""
    for folder in (run / "checkpoints", run / "critic" / "checkpoints", run / MIXTURES):
        yield from (path_of(folder, later) for later in versions(folder) if later > version)
    yield from (path for path in map(run.joinpath, WHOLE) if path.exists())
    for file in sorted((run / "archive").glob("step-*.msgpack")):
        if int(file.stem.removeprefix("step-")) >= version:
            yield file


def _cut_groups(run: Path, aside: Path) -> None:
    """What is known of groups that came after the last one of the steps that stay."""
    trained = {group for row in each_line(run / "ledger.jsonl") for group in row["groups"]}
    last = max(trained, default=-1)
    _cut(run / "dropped.jsonl", aside / "dropped.jsonl", lambda row: row["group"] <= last)
    kept = trained | {row["group"] for row in each_line(run / "dropped.jsonl")}
    (aside / "logs").mkdir()
    for file in (run / "logs").glob("*.finished.jsonl"):
        _cut(file, aside / "logs" / file.name, lambda row: row["group"] in kept)


def _cut(file: Path, aside: Path, stays: Callable[[dict[str, Any]], bool]) -> None:
    """``file`` keeps the rows that stay; all of it is in ``aside``."""
    if not file.exists():
        return
    cut = file.with_name(f".{file.name}-cut")
    with cut.open("w") as kept:
        kept.writelines(line_of(row) + "\n" for row in each_line(file) if stays(row))
    file.rename(aside)
    cut.rename(file)


def _stays(row: dict[str, Any], version: int) -> bool:
    """A step makes the version after it; an evaluation is of the version that it names."""
    step = row.get("step", row.get("critic_step"))
    of_version = row.get("kind") in ("eval", "eval_loss") or "set" in row
    return step is None or step < version + of_version
