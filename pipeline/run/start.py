"""`penstock run`: from what was typed to a run, and to what is said at its end."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from penstock.pipeline.config import Config, ConfigError, dump, load
from penstock.pipeline.config.origin import Origin
from penstock.pipeline.preflight.look import look
from penstock.pipeline.preflight.report import Report
from penstock.pipeline.preflight.steps import counted
from penstock.pipeline.report.console import print_summary
from penstock.pipeline.resources.choice import choose
from penstock.pipeline.run.data_rows import changed_rows
from penstock.pipeline.run.finish import give_up
from penstock.pipeline.run.folder import address_file, begin, claim, make_folder, new_folder
from penstock.pipeline.run.launcher import InterruptedRunError, RunError, ends
from penstock.pipeline.run.launcher import run as launch
from penstock.pipeline.run.lock import held
from penstock.pipeline.run.programs import Programs, of_their_own, started, too_few_gpus
from penstock.pipeline.run.resume import STORE, committed, complete, how_to_go_on, resumed
from penstock.services.runtime.plain import plain, visible

COMPLETE, FAILED, INTERRUPTED = 0, 1, 130
"""Exit codes. A setup error, something that a better config mends and that is found before anything starts, is raised,
and becomes 2 in `pipeline.cli`."""


Show = Callable[[Console, dict[str, Any], Path], None]


def start(
    console: Console,
    file: str | None,
    overrides: list[str],
    resume: Path | None,
    dry_run: bool,
    show: Show = print_summary,
    wait_s: float = 0.0,
) -> int:
    """Checks everything, runs it, has ``show`` print what it came to; returns the exit code. ``wait_s``: for somebody
    else who is still at work in the folder. Raises `ConfigError`."""
    if file is not None and "=" in file and not os.path.exists(file):  # noqa: PTH110 - a Path's raises for long ones
        overrides, file = [file, *overrides], None
    if file is None and resume is None:
        raise ConfigError("give a config, e.g. penstock run configs/quickstart.yaml, or a run's folder with --resume")
    config, origin, changed = laid_out(file, overrides, resume)
    os.environ.pop(STORE, None)  # the broker is told, and nobody else that is started
    folder = resume or new_folder(config, Path(file or ""))
    if resume and not dry_run and (summary := complete(folder, config)):
        more = f"to go on, {how_to_go_on(config, summary)}"
        console.print(f"the run in {folder} is complete; {more}", highlight=False, markup=False, soft_wrap=True)
        print_summary(console, summary, folder)
        return COMPLETE
    with ExitStack() as stack:
        # Of one that goes on at once: from then on what the start before left counts for nothing. Nothing is made for a
        # new one that cannot work, but for what its programs say.
        early = bool(resume or config.programs)
        if early and not dry_run:
            folder = resume or claim(folder, bool(config.run.name))
            stack.enter_context(_taken(folder, wait_s))
        try:
            with _interrupting():
                lacking = too_few_gpus(config) if dry_run else ""
                there = config.model_copy(update={"programs": {}}) if lacking else config
                programs = stack.enter_context(started(there, None if dry_run else folder, console))
                began = time.monotonic()
                with console.status("looking at data, model and functions …"):
                    report = look(config, folder, not lacking, lacking)
                looked_s = time.monotonic() - began
        except KeyboardInterrupt:
            typer.echo("interrupted before the run began", err=True)
            return INTERRUPTED
        if dry_run:
            return _show(config, report, changed)
        report.check(elsewhere=False)
        if not early:
            folder = claim(folder, bool(config.run.name))
            stack.enter_context(_taken(folder, wait_s))
        report.notes += changed_rows(folder, report.sizes)
        _tell(console, report, committed(folder) if resume else None, changed)
        return _run(console, config, origin, folder, show, programs, looked_s)


@contextmanager
def _interrupting() -> Iterator[None]:
    """What ends a run that has begun (`ends`) is Ctrl-C meanwhile, so that nothing is left behind."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in ends()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _taken(folder: Path, wait_s: float) -> Iterator[None]:
    make_folder(folder, "run.folder")
    with held(folder, wait_s):
        yield


def _tell(console: Console, report: Report, done: int | None, changed: list[str]) -> None:
    """What one should know before it starts; ``done``: steps of one that goes on."""
    lines = [f"note: {plain(note)}" for note in report.notes]
    lines += [] if done is None else [f"goes on after {done} steps"]
    for line in (*lines, *changed):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def laid_out(file: str | None, overrides: list[str], resume: Path | None) -> tuple[Config, Origin, list[str]]:
    """The config, where it is from, and what is changed in a run that goes on, or was left open by its config: with as
    many steps as the prompts make, where `trainer.steps` says so, and the layout of `run.placement: auto`."""
    config, origin, changed = _placed(file, overrides, resume)
    config, line = counted(config)
    return config, origin, [*changed, *([f"changed: {line}"] if line else [])]


def _placed(file: str | None, overrides: list[str], resume: Path | None) -> tuple[Config, Origin, list[str]]:
    """As `_read`, with the layout of `run.placement: auto` for what GPUs are here now, whatever it was before."""
    config, origin, changed = _read(file, overrides, resume)
    if resume and complete(resume, config):
        return config, origin, changed
    given = [*origin.before_auto, *overrides]
    config, origin, changed = _read(file, given, resume)
    if config.run.placement != "auto":
        return config, replace(origin, before_auto=()), changed
    with of_their_own(config):
        choice = choose(config)
    config, origin, changed = _read(file, [*given, *choice.overrides], resume)
    return config, replace(origin, before_auto=choice.before), [*changed, f"changed: {choice.line}"]


def _read(file: str | None, overrides: list[str], resume: Path | None) -> tuple[Config, Origin, list[str]]:
    """The config, where it is from, and what is changed in a run that goes on."""
    if resume:
        return resumed(resume, Path(file) if file else None, overrides)
    assert file
    return load(Path(file), overrides), Origin(str(Path(file).resolve()), tuple(overrides)), []


def _show(config: Config, report: Report, changed: list[str]) -> int:
    """The resolved config where a run could work by it, and what was found as its comments."""
    if not report.problems:
        typer.echo(dump(config), nl=False)
    for change in changed:
        typer.echo(f"# {change}")
    for line in report.lines:
        typer.echo(f"# {line}")
    for note in report.notes:
        typer.echo(f"# note: {plain(note)}")
    for lack in report.here:
        typer.echo(f"# on this machine: {lack}")
    if report.here:
        typer.echo("# so it would not run here; on a machine that has these it may")
    report.check(elsewhere=True)
    return COMPLETE


def _run(
    console: Console, config: Config, origin: Origin, folder: Path, show: Show, programs: Programs, looked_s: float
) -> int:
    for line in begin(config, folder, origin):
        console.print(f"note: {line}", highlight=False, markup=False, soft_wrap=True)
    address_file(folder).unlink(missing_ok=True)  # of a broker that is no more
    console.print(f"run folder: {folder}", highlight=False, markup=False, soft_wrap=True)
    if config.gateway.count and not any(program.of_run for program in config.programs.values()):
        console.print(waits_for_agents(folder), highlight=False, markup=False, soft_wrap=True)
    try:
        summary = launch(config, folder, console, programs, looked_s)
    except RunError as error:
        typer.echo(f"error: {visible(str(error))}\nlogs: {folder / 'logs'}\n{go_on(folder)}", err=True)
        if isinstance(error, InterruptedRunError):
            return INTERRUPTED
        give_up(folder, str(error))
        return FAILED
    show(console, summary, folder)
    if summary["outcome"] == "complete":
        return COMPLETE
    console.print(go_on(folder), highlight=False, markup=False, soft_wrap=True)
    return INTERRUPTED


def waits_for_agents(folder: Path) -> str:
    """What the user has yet to start, where agents make the groups of a run."""
    return (
        f"it waits for agents, which you start beside it: penstock play {shlex.quote(str(folder))} my_env:MyClass, or "
        f"a program with penstock.AgentClient({str(folder)!r})"
    )


def go_on(folder: Path) -> str:
    """The command that goes on with a run that has stopped."""
    return f"go on with: penstock run --resume {shlex.quote(str(folder))} (and keys that are to change: KEY=VALUE)"
