"""The steps that the prompts make, where `trainer.steps` leaves them to `prompts.epochs`."""

from __future__ import annotations

from pathlib import Path

from penstock.pipeline.config import Config, ConfigError
from penstock.pipeline.preflight.hub import without_hub
from penstock.pipeline.preflight.report import Done, Report
from penstock.services.data import open_source
from penstock.services.runtime import logs
from penstock.services.runtime.lines import each_line

NOTHING = Done()


def done_in(folder: Path) -> Done:
    """What the run in ``folder`` has trained on, by its ledger."""
    groups = {row["step"]: len(row.get("groups", ())) for row in each_line(folder / "ledger.jsonl")}
    return Done(1 + max(groups, default=-1), sum(groups.values()))


def steps_made(config: Config, rows: int, done: Done = NOTHING) -> int:
    """Steps of `gate.groups_per_step` groups that ``prompts.epochs`` of so many prompts make, the last of what is left,
    behind those that are ``done``, which may have had another size; 0 without epochs. Fewer come to be where groups are
    dropped, or prompts rest."""
    if not config.prompts.epochs:
        return 0
    left = max(0, rows * config.prompts.epochs - done.groups)
    return done.steps + -(-left // config.gate.groups_per_step)


def counted(config: Config, began: Config | None = None, done: Done = NOTHING) -> tuple[Config, str]:
    """``config`` with a number as `trainer.steps`, and a line that tells it; an empty line where it had one. The number
    of a run that ``began``, of which so much is ``done``, stays, unless other epochs are asked for or steps have
    another size. Raises a `SetupError` where there are no prompts to count."""
    if config.trainer.steps is not None:
        return config, ""
    if config.prompts.epochs is None:
        raise ConfigError(
            "trainer.steps: null is as many as prompts.epochs makes, and that is not given; set prompts.epochs, e.g. "
            "1, or give a number of steps"
        )
    if began and _as_many(began) == _as_many(config):
        return _with_steps(config, began.trainer.counted_steps), ""
    logs.silence()
    with without_hub(config, Report()):
        rows = len(open_source(config.prompts.train))
    if not rows:
        raise ConfigError("prompts.train: the data source has no rows, so trainer.steps=null has none to count")
    steps = steps_made(config, rows, done)
    return _with_steps(config, steps), (
        f"trainer.steps: null → {steps:,} (prompts.epochs={config.prompts.epochs} of {rows:,} prompts, "
        f"{config.gate.groups_per_step} groups a step)"
    )


def _as_many(config: Config) -> tuple[int | None, int]:
    """What the number of steps follows from, beside the prompts."""
    return config.prompts.epochs, config.gate.groups_per_step


def _with_steps(config: Config, steps: int) -> Config:
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": steps})})
