"""`penstock.Trainer`: a run that a script or a notebook describes, with functions of its own."""

from __future__ import annotations

import json
import shutil
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from penstock.pipeline.api.functions import Defined, Functions
from penstock.pipeline.api.run import FOLDERS, OnStep, Run, launched, script_folder
from penstock.pipeline.config import ConfigError, load
from penstock.pipeline.config.load import as_overrides, as_yaml, plain_value, read_sections
from penstock.pipeline.observe.pace import Pace
from penstock.pipeline.observe.terminal import learned
from penstock.pipeline.report.console import RunConsole, print_findings
from penstock.pipeline.run.command import penstock
from penstock.pipeline.run.resume import NOWHERE
from penstock.protocols.experience import Prompt
from penstock.services.data import DataError
from penstock.services.data.written import Written, line, shows

Choice = str | Mapping[str, Any] | Defined
"""A built-in by its name, a section of the config, or a function of your own."""
Rows = Iterable[Mapping[str, Any] | Prompt]


class Trainer:
    """A run, not started yet. ``config`` is a YAML file, or the same as a map. What else is given takes the place of
    what the config says:

    ``reward``: a function, or several, each with a weight of 1 (or ``{"function": …, "weight": …}``).
    ``prompts``, ``evaluation``, ``eval_given`` (rows that the loss is measured on, each with an ``answer``): rows with
    ``prompt`` (a user's text, or messages) and ``truth``, for `rollout.given` ``answer`` (and ``rejected``), ``tools``
    that it tells of, ``chat_template_kwargs``, and ``images`` where it shows some, a `datasets.Dataset` for instance,
    or `penstock.Prompt`; or a function that returns a sequence of the latter.
    ``advantage``, ``loss``, ``correction``: an algorithm's parts. ``environment``: a class with ``step(answer)``,
    or one by each source of prompts.
    ``overrides``: any other keys, e.g. ``{"trainer.steps": 50}``.

    Functions may be defined in the script or the notebook itself: they are written down beside the run's config, as
    text. Raises `ConfigError` for what cannot be.

        penstock.Trainer("configs/quickstart.yaml", reward=my_reward).train()
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any],
        *,
        name: str | None = None,
        folder: str | Path | None = None,
        reward: Choice | Sequence[Choice] | None = None,
        prompts: Rows | Defined | None = None,
        evaluation: Rows | Defined | None = None,
        eval_given: Rows | Defined | None = None,
        advantage: Choice | None = None,
        loss: Choice | None = None,
        correction: Choice | None = None,
        environment: Defined | Mapping[str, Defined] | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        _check({"name": (name, str), "folder": (folder, str | Path), "overrides": (overrides, Mapping)})
        if not isinstance(config, str | Path | Mapping):
            raise ConfigError(f"config: give a YAML file, or the same as a map, not {config!r:.60}")
        if wrong := [key for key in overrides or {} if key in ("run", *NOWHERE)]:
            raise ConfigError(
                f"overrides: {wrong[0]}: give a run's name and folder as name= and folder=, and its other keys one by "
                "one, e.g. run.seed"
            )
        self._file = None if isinstance(config, Mapping) else Path(config)
        data: dict[str, Any] = plain_value(config, "") if isinstance(config, Mapping) else read_sections(Path(config))
        run = _section(data, "run")
        _check({"run.name": (run.get("name"), str), "run.folder": (run.get("folder"), str)})
        run["name"] = name or run.get("name") or time.strftime("run-%Y%m%d-%H%M%S")
        run["folder"] = str(Path(folder or run.get("folder") or "runs").expanduser().resolve())
        self.folder = Path(run["folder"]) / run["name"]
        """Where the run will be."""
        self._own = script_folder(self.folder)
        # Of this run alone: another run of this process has another.
        self._module = f"script_functions_{zlib.crc32(str(self.folder).encode()):08x}"
        self._functions, self._data = Functions(self._module), data
        self._rows: dict[str, list[str]] = {}
        self._set(reward, prompts, {"eval": evaluation, "eval_given": eval_given}, environment)
        for part, choice in (("advantage", advantage), ("loss", loss), ("correction", correction)):
            if choice is not None:
                _section(data, "trainer", "algorithm")[part] = self._chosen(choice, part)
        self._overrides = as_overrides(overrides or {})

    def start(self) -> Run:
        """Starts it in the background, in processes of its own, which go on when this one ends. Raises `ConfigError`
        for what no config could have."""
        if self.folder.exists():
            raise ConfigError(
                f"name: {self.folder} exists; choose another name, or go on with penstock.Run(…).resume()"
            )
        self._own.mkdir(parents=True, exist_ok=True)
        for name, lines in self._rows.items():
            (self._own / name).write_text("".join(lines))
        if self._functions.source:
            (self._own / f"{self._module}.py").write_text(self._functions.source)
        file = self._own / "config.yaml"
        file.write_text(as_yaml(self._data))
        beside = [self._file.resolve().parent] if self._file else []
        (self._own / FOLDERS).write_text(json.dumps([str(each) for each in [*beside, *self._functions.folders]]))
        try:
            load(file, self._overrides)
        except ConfigError:
            shutil.rmtree(self._own)
            raise
        return launched(penstock("run", str(file), *self._overrides), self.folder)

    def train(self, on_step: OnStep | None = None) -> Run:
        """Starts it, and waits until it is over; with a progress bar, unless ``on_step`` is told of each step. Ctrl-C
        has the run save a checkpoint and end. Raises `RunFailed`."""
        run = self.start()
        try:
            if on_step is not None:
                run.wait(on_step=on_step)
            else:
                _show(run)
        except KeyboardInterrupt:
            typer.echo("interrupted: the run drains and saves a checkpoint, which is waited for …", err=True)
            run.stop()
            if (run.folder / "config.yaml").is_file():  # it had begun
                again = f"penstock.Run({str(run.folder)!r}).resume()"
                typer.echo(f"stopped: the run is in {run.folder}; go on with {again}", err=True)
            raise
        return run

    def _set(
        self,
        reward: Any,
        prompts: Any,
        held_out: Mapping[str, Any],
        environment: Defined | Mapping[str, Defined] | None,
    ) -> None:
        data = self._data
        if reward is not None:
            alone = callable(reward) or isinstance(reward, str | Mapping) or not isinstance(reward, Iterable)
            every = [reward] if alone else list(reward)
            _section(data, "reward")["functions"] = [self._rewarding(each) for each in every]
        if prompts is not None:
            _section(data, "prompts")["train"] = self._source(prompts, "prompts")
        for key, called, name in (("eval", "evaluation", "held_out"), ("eval_given", "eval_given", "given")):
            if held_out[key] is not None:
                _section(data, "prompts")[key] = {name: self._source(held_out[key], called)}
        rollout = _section(data, "rollout") if environment is not None else {}
        if isinstance(environment, Mapping):
            rollout["environments"] = {source: self._playing(one) for source, one in environment.items()}
        elif environment is not None:
            rollout["environment"] = self._playing(environment)

    def _playing(self, environment: Defined) -> dict[str, str]:
        return {"environment": self._functions.name(environment, "environment")}

    def _rewarding(self, choice: Choice) -> dict[str, Any]:
        if isinstance(choice, str):
            return {"function": choice}
        if isinstance(choice, Mapping):
            function = choice.get("function")
            named = {"function": self._functions.name(function, "reward")} if callable(function) else {}
            given: dict[str, Any] = plain_value({**choice, **named}, "reward")
            return given
        return {"function": self._functions.name(choice, "reward"), "name": choice.__name__}

    def _chosen(self, choice: Choice, key: str) -> dict[str, Any]:
        if isinstance(choice, str):
            return {"type": choice}
        if isinstance(choice, Mapping):
            section: dict[str, Any] = plain_value(choice, key)
            return section
        return {"type": "custom", "function": self._functions.name(choice, key)}

    def _source(self, given: Any, key: str) -> dict[str, Any]:
        if callable(given) and not hasattr(given, "__len__"):
            return {"type": "custom", "function": self._functions.name(given, key)}
        if isinstance(given, Mapping):  # a section, as the config has it
            section: dict[str, Any] = plain_value(given, key)
            return section
        if isinstance(given, str) or not (isinstance(given, Iterable) or hasattr(given, "__getitem__")):
            raise ConfigError(f"{key}: give rows, or a function that returns them, not {given!r:.60}")
        table = hasattr(given, "features") or hasattr(given, "to_dicts")  # its maps have one another's keys
        if hasattr(given, "to_dicts"):  # of polars
            given = given.to_dicts()
        elif hasattr(given, "columns") and hasattr(given, "to_dict"):  # of pandas
            given = given.to_dict("records")
        lines = []
        for number, row in enumerate(given):
            if not isinstance(row, Mapping | Prompt):
                raise ConfigError(f"{key}: row {number} is no map with a prompt, but {row!r:.60}")
            try:
                lines.append(line(row, table))
            except KeyError:
                has = ", ".join(map(str, row)) or "nothing"
                raise ConfigError(f"{key}: row {number} has no prompt; it has {has}") from None
            except DataError as error:
                raise ConfigError(f"{key}: row {number}: {error}") from None
            except TypeError as error:
                raise ConfigError(
                    f"{key}: row {number}: {error}; a prompt is text or messages, a truth is JSON"
                ) from None
        self._rows[f"{key}.jsonl"] = lines
        made = f"{Written.__module__}:{Written.__name__}"
        options = {"file": str(self._own / f"{key}.jsonl")}
        return {"type": "custom", "function": made, "options": options, "pictures": any(map(shows, lines))}


def _check(given: Mapping[str, tuple[Any, Any]]) -> None:
    """Raises `ConfigError` for what is not of its kind, by its key."""
    for key, (value, kind) in given.items():
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{key}: give {'a map' if kind is Mapping else 'text'}, not {value!r:.60}")


def _section(data: dict[str, Any], *names: str) -> dict[str, Any]:
    for place, name in enumerate(names, 1):
        data[name] = {} if data.get(name) is None else data[name]
        data = data[name]
        if not isinstance(data, dict):
            raise ConfigError(f"{'.'.join(names[:place])}: a section is a map of keys, not {data!r:.60}")
    return data


def _show(run: Run) -> None:
    """How far it is, step by step; at the end, what one should look at."""
    console = RunConsole()
    bare = console.is_jupyter and find_spec("ipywidgets") is None  # rich draws its bar there with these alone
    summary = run.wait(on_step=_print_line) if bare else _show_bar(run, console)
    print_findings(console, summary)


def _words(row: dict[str, Any]) -> str:
    name, value = learned(row)
    return f"{name} {value}" + (f"  lag {row['lag_mean']:.2f}" if name == "reward" else "")  # given answers have none


def _print_line(row: dict[str, Any]) -> None:
    """In the place of the line before."""
    typer.echo(f"\r{row['step'] + 1} steps  {_words(row)}", nl=False)


def _show_bar(run: Run, console: Console) -> dict[str, Any]:
    """A progress bar, in a notebook too. Returns the summary."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    eta, pace = TextColumn("eta {task.fields[left]}"), Pace()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), eta)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=None, left="")

        def on_step(row: dict[str, Any]) -> None:
            if progress.tasks[0].total is None:
                progress.update(task, total=read_sections(run.folder / "config.yaml")["trainer"]["steps"])
            pace.tell(row["step"] + 1, row["train_s"])
            left = pace.left(int(progress.tasks[0].total or 0))
            progress.update(task, completed=row["step"] + 1, description=_words(row), left=left)

        return run.wait(on_step=on_step)
