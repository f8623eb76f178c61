"""`penstock simulate`: what a run would do, before anybody has a machine for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from penstock.pipeline.config import Config, ConfigError, load
from penstock.pipeline.resources.devices import devices_of
from penstock.pipeline.resources.gpus import total_gpus
from penstock.pipeline.resources.loads import half_of_the_longest, longest_response
from penstock.pipeline.resources.model_shape import shape_of
from penstock.pipeline.simulate import costs as known
from penstock.pipeline.simulate.calibrate import like
from penstock.pipeline.simulate.costs import Costs
from penstock.pipeline.simulate.world import Outcome, World
from penstock.pipeline.tools.arguments import warn

BUSY = 0.9
"""Who is busy for more of the time than this is what a run waits for."""


def costs_of(
    run: Path | None, file: Path | None, gpus: str | None, length: float | None, prompt: float, changes: Sequence[str]
) -> Callable[[Config], Costs]:
    """What things cost in a run of a config: as in another run, as a file says, or from a data sheet, whichever is
    given; with ``changes`` like ``reward_s=4``. Raises `ConfigError`."""
    if sum(source is not None for source in (run, file, gpus)) != 1:
        raise ConfigError("say what things cost by one of --like RUN, --costs FILE, --gpus H100")
    changed = dict(map(_changed, changes))
    if "length" in changed:
        changed.setdefault("lengths", ())
    fixed = like(run, warn) if run is not None else known.of_file(file) if file is not None else None

    def of(config: Config) -> Costs:
        if config.rollout.all_given:
            raise ConfigError("rollout.given.answers: every answer is given, so that there are no rollouts to simulate")
        found = fixed or _on_gpus(config, gpus or "", length, prompt)
        found = known.checked("--cost", found.model_dump() | changed)
        if not found.lengths and found.length > (longest := longest_response(config)):
            warn(
                f"length: responses of {found.length:g} tokens on average are cut at {longest}, the longest that "
                "rollout.sampling.max_new_tokens, turns and rollout.engine.max_length allow"
            )
        return found

    return of


def _changed(change: str) -> tuple[str, Any]:
    key, value = _pair("--cost", change)
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--cost {key}: {value!r} is no value: {' '.join(str(error).split())}") from None


def _on_gpus(config: Config, gpus: str, length: float | None, prompt: float) -> Costs:
    shape = shape_of(config)
    if shape is None:
        raise ConfigError("model.path: the model's sizes are not known here; give a folder with its config.json")
    counted = gpus[:1].isdigit()
    count, device = devices_of(gpus if counted else f"1x{gpus}")
    if counted and count < (wanted := total_gpus(config)):
        warn(f"--gpus {gpus}: the run wants {wanted} GPUs, and is simulated as if there were so many")
    response = half_of_the_longest(config) if length is None else length
    if not (0 < response < inf and 0 <= prompt < inf):
        raise ConfigError(f"--length {response:g} --prompt {prompt:g}: these are no numbers of tokens")
    return known.on_gpus(config, shape, device, response, prompt)


def show(
    console: Console,
    path: Path,
    overrides: Sequence[str],
    costs: Callable[[Config], Costs],
    varied: Sequence[str],
    steps: int,
) -> None:
    """Prints a row for each combination of what is ``varied``, like ``gate.max_lag=0,1,2``."""
    keys = [_pair("--vary", each) for each in varied]
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for name in [key for key, _ in keys]:
        table.add_column(name.replace(".", ".\n"), justify="right", no_wrap=True)
    for name in ("s/step", "faster", "tokens/s", "busy:\ntrainer", "\nrollouts", "lag", "most", "waits for"):
        table.add_column(name, justify="right", no_wrap=True)
    first: Outcome | None = None
    with Progress(console=console, transient=True) as bar:
        for values in product(*(_values(values) for _, values in keys)):
            config = load(path, [*overrides, *(f"{key}={value}" for (key, _), value in zip(keys, values, strict=True))])
            task = bar.add_task(escape(" ".join(values)) or "simulating", total=steps)
            found = World(config, costs(config), steps).run(lambda step, task=task: bar.update(task, completed=step))  # type: ignore[misc]
            bar.remove_task(task)
            first = first or found
            table.add_row(
                *map(Text, values),
                f"{step_s:.3g}" if (step_s := 1 / found.steps_per_s) < 1000 else f"{step_s:,.0f}",
                f"{found.steps_per_s / first.steps_per_s:.2f}x",
                f"{found.tokens_per_s:,.0f}",
                f"{found.trainer_busy:.0%}",
                f"{found.rollouts_busy:.0%}",
                f"{found.lag_mean:.2f}",
                f"{found.lag_max}",
                _waits_for(found),
            )
    console.print(table)


def _waits_for(found: Outcome) -> str:
    shares = {"trainer": found.trainer_busy, "rollouts": found.rollouts_busy, **found.others_busy}
    busiest = max(shares, key=lambda kind: shares[kind])
    return busiest if shares[busiest] > BUSY else "each other"


def _values(text: str) -> list[str]:
    """Those between commas, of which braces and brackets may have some of their own."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return found


def _pair(option: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not value:
        raise ConfigError(f"{option}: {text!r} is not like KEY=VALUE")
    return key, value
