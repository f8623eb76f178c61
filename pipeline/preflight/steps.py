"""The steps that the prompts make, where `trainer.steps` leaves them to `prompts.epochs`."""

from __future__ import annotations

from penstock.pipeline.config import Config, ConfigError
from penstock.pipeline.preflight.hub import without_hub
from penstock.pipeline.preflight.report import Report
from penstock.services.data import open_source
from penstock.services.runtime import logs


def steps_made(config: Config, rows: int) -> int:
    """Steps of `gate.groups_per_step` groups that ``prompts.epochs`` of so many prompts make, the last of what is left;
    0 without epochs. Fewer come to be where groups are dropped, or prompts rest."""
    return -(-rows * (config.prompts.epochs or 0) // config.gate.groups_per_step)


def counted(config: Config, began: Config | None = None) -> tuple[Config, str]:
    """``config`` with a number as `trainer.steps`, and a line that tells it; an empty line where it had one. The number
    of a run that ``began`` stays, unless other epochs are asked for. Raises a `SetupError` where there are no prompts
    to count."""
    if config.trainer.steps is not None:
        return config, ""
    if config.prompts.epochs is None:
        raise ConfigError(
            "trainer.steps: null is as many as prompts.epochs makes, and that is not given; set prompts.epochs, e.g. "
            "1, or give a number of steps"
        )
    if began and began.prompts.epochs == config.prompts.epochs:
        return _with_steps(config, began.trainer.counted_steps), ""
    logs.silence()
    with without_hub(config, Report()):
        rows = len(open_source(config.prompts.train))
    if not rows:
        raise ConfigError("prompts.train: the data source has no rows, so trainer.steps=null has none to count")
    steps = steps_made(config, rows)
    return _with_steps(config, steps), (
        f"trainer.steps: null → {steps:,} (prompts.epochs={config.prompts.epochs} of {rows:,} prompts, "
        f"{config.gate.groups_per_step} groups a step)"
    )


def _with_steps(config: Config, steps: int) -> Config:
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": steps})})
