"""The programs of others that a run starts beside itself (`programs`): ready before anything else, ended last."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console

from penstock.pipeline.config import Config, ConfigError
from penstock.pipeline.config.programs import RUN, ProgramConfig
from penstock.pipeline.resources.gpus import gpus_of_programs
from penstock.pipeline.resources.placement import beds
from penstock.pipeline.run.answering import lacks, refuses
from penstock.pipeline.run.keeper import Keeper
from penstock.pipeline.run.supervisor import Child, Supervisor
from penstock.services.runtime import logs
from penstock.services.runtime.gpus import VISIBLE, visible_gpus
from penstock.services.runtime.guard import guarded
from penstock.services.runtime.user_folders import folder_of, path_with_ours

ASK_S, LOOK_S = 0.3, 0.05
"""Between two looks at whether a program is ready; and whether it sleeps."""
STOP_S, LEAVE_S = 10.0, 5.0
"""More than its guard gives it; and for one of a start before, which was killed, to be gone."""
TELL_S = 30.0
"""Between two words to who waits, where a terminal shows nothing."""


class Programs:
    """Those of ``config``; ``gpus``: CUDA_VISIBLE_DEVICES of each that has some. What they say is in ``logs``."""

    def __init__(self, config: Config, gpus: dict[str, str], logs: Path) -> None:
        self._configs, self._gpus, self._logs = config.programs, gpus, logs
        self._sleepers = config.sleepers
        self._supervisor, self._keepers = Supervisor(config.run.max_restarts), list[Keeper]()

    @property
    def children(self) -> list[Child]:
        """Their processes."""
        return self._supervisor.children

    @property
    def restarts(self) -> int:
        """How often they were started again."""
        return self._supervisor.restarts

    def start(self, console: Console) -> None:
        """Those that are not told of the run; returns once all are ready. Raises `ConfigError`, which says why one is
        not."""
        logs.silence()
        patient = time.monotonic() + LEAVE_S
        for name, program in self._configs.items():
            while program.ready and not lacks(program.ready):
                if time.monotonic() < patient:
                    time.sleep(ASK_S)
                    continue
                raise ConfigError(
                    f"programs.{name}.ready: {program.ready} answers before the program is started, so another one is "
                    "there: end that, or take another port"
                )
        first = {name: program for name, program in self._configs.items() if not program.of_run}
        self._start_all({name: program for name, program in first.items() if name not in self._sleepers}, console)
        for name, program in self._sleepers.items():  # they may share a GPU, whose free memory they measure
            self._start_all({name: program}, console)
            with console.status(f"putting programs.{name} to sleep, and waking it …"):
                self._try_to_sleep(name, program)

    def rest(self, run: Path, wait: Callable[[], None]) -> str | None:
        """The run in the folder ``run`` begins: those that sleep do, until its learners let them wake; ``wait`` is
        called meanwhile. Returns an error where one cannot go on."""
        error = None
        for name, program in self._sleepers.items():
            gpus = [each for each in self._gpus.get(name, "").split(",") if each]
            self._keepers.append(Keeper(name, program, self._child(name), run, gpus))
        while not error and not all(keeper.slept for keeper in self._keepers):
            wait()
            error = self.poll()
            time.sleep(LOOK_S)
        return error

    def begin(self, run: Path) -> None:
        """The run in the folder ``run`` is under way: starts those that are told of it."""
        for name, program in self._configs.items():
            if program.of_run:
                self._start(name, program, [str(run) if word == RUN else word for word in program.words])

    def poll(self) -> str | None:
        """Starts again what died; returns an error where one cannot go on."""
        self._supervisor.poll()
        child = next((child for child in self.children if child.fatal), None)
        return f"{child.fatal}; see {child.stderr}" if child else None

    def close(self) -> None:
        """Ends them all."""
        for keeper in self._keepers:
            keeper.close()
        self._supervisor.stop(STOP_S)
        for keeper in self._keepers:
            keeper.join()

    def _start_all(self, programs: Mapping[str, ProgramConfig], console: Console) -> None:
        """Starts these, and returns once they are ready."""
        for name, program in programs.items():
            self._start(name, program, program.words)
        waited_for = {_called(name): program for name, program in programs.items() if program.ready}
        words = ", ".join(f"{name} ({program.ready})" for name, program in waited_for.items())
        if waited_for:
            with console.status(f"waiting for {words} …"):
                self._wait_for(waited_for, "" if console.is_terminal else words)

    def _start(self, name: str, program: ProgramConfig, words: list[str]) -> None:
        env = {"PATH": path_with_ours(), VISIBLE: self._gpus.get(name, ""), **program.env}
        command, log = guarded(words, [*os.environ, *env]), self._logs / f"program-{name}.stderr"
        self._supervisor.start(_called(name), command, log, env, foreign=True, folder=folder_of(words))

    def _child(self, name: str) -> Child:
        """The process of the program of that name."""
        return next(child for child in self.children if child.name == _called(name))

    def _try_to_sleep(self, name: str, program: ProgramConfig) -> None:
        """Once there and back, before anything is begun that would need it. Raises `ConfigError`."""
        for key, url in (("sleep", program.sleep or ""), ("wake", program.wake or "")):
            if why := refuses(url, program.ready_s):
                raise ConfigError(
                    f"programs.{name}.{key}: {url} {why}; vLLM has it with --enable-sleep-mode and env: "
                    f'{{VLLM_SERVER_DEV_MODE: "1"}}, and SGLang with --enable-memory-saver; {_last(self._child(name))}'
                )
        self._wait_for({_called(name): program}, "")

    def _wait_for(self, programs: Mapping[str, ProgramConfig], words: str) -> None:
        """By the names of their processes. ``words``: told to who has no terminal; then how it stands, now and then."""
        began = told = time.monotonic()
        left, children = dict(programs), {child.name: child for child in self.children}
        if words:
            typer.echo(f"waiting for {words}; what they say: {self._logs}/program-NAME.stderr", err=True)
        while left:
            lacking = {name: lacks(program.ready or "") for name, program in left.items()}
            left = {name: program for name, program in left.items() if lacking[name]}
            for child in children.values():
                if child.process is not None and child.process.poll() is not None:
                    how = f"{child.name} ended with exit code {child.process.returncode} before the run could begin"
                    raise ConfigError(f"{how}; {_last(child)}")
            waited_s = time.monotonic() - began
            for name, program in left.items():
                if waited_s > program.ready_s:
                    raise ConfigError(
                        f"{name}.ready: {program.ready} {lacking[name]}, {program.ready_s:g} s after the program was "
                        f"started ({name}.ready_s); {_last(children[name])}"
                    )
            if words and left and time.monotonic() > told + TELL_S:
                told = time.monotonic()
                typer.echo(f"waiting for {', '.join(left)} for {waited_s:.0f} s", err=True)
            time.sleep(ASK_S if left else 0)


@contextmanager
def started(config: Config, folder: Path | None, console: Console) -> Iterator[Programs]:
    """The programs of a run in ``folder``, ready, with GPUs that nobody else sees meanwhile. None: somebody only looks,
    and what they say is kept where one could not be started. Raises `ConfigError`."""
    if lacking := too_few_gpus(config):
        raise ConfigError(lacking)
    aside = Path(tempfile.mkdtemp(prefix="penstock-programs-")) if folder is None and config.programs else None
    with of_their_own(config) as gpus:
        programs = Programs(config, gpus, aside or (folder or Path()) / "logs")
        try:
            try:
                programs.start(console)
            except ConfigError:  # which names it
                aside = None
                raise
            yield programs
        finally:
            programs.close()
            if aside:
                shutil.rmtree(aside, ignore_errors=True)


def too_few_gpus(config: Config) -> str:
    """Why this machine has too few GPUs for the programs; empty: it has enough."""
    wanted = gpus_of_programs(config)
    gpus = visible_gpus() if wanted or config.sleepers else []
    there = len(gpus)
    if not wanted or there > wanted or (there == wanted and config.trainer.device == "cpu"):
        try:
            beds(config, gpus[: there - wanted])
        except ConfigError as error:
            return str(error)
        return ""
    many = ", ".join(f"{name} {program.gpus}" for name, program in config.programs.items() if program.gpus)
    return (
        f"programs: they want {wanted} GPU{'s' * (wanted > 1)} of their own ({many}) beside those of the run, and this "
        f"machine has {there}: give them fewer (programs.NAME.gpus), start them on another machine yourself, or share "
        "the trainer's (programs.NAME.sleep, with run.placement=colocated)"
    )


@contextmanager
def of_their_own(config: Config) -> Iterator[dict[str, str]]:
    """CUDA_VISIBLE_DEVICES of each program that wants GPUs: the last ones, where there are enough, or, of one that
    sleeps, some of the trainer's. This process, and what it starts, does not see those that are a program's own
    meanwhile."""
    if not any(program.gpus for program in config.programs.values()) or too_few_gpus(config):
        yield {}
        return
    left, before, found = visible_gpus(), os.environ.get(VISIBLE), dict[str, str]()
    for name, program in config.programs.items():
        if program.gpus and name not in config.sleepers:
            found[name], left = ",".join(left[-program.gpus :]), left[: -program.gpus]
    found |= {name: ",".join(gpus) for name, gpus in beds(config, left).items()}
    os.environ[VISIBLE] = ",".join(left)
    try:
        yield found
    finally:
        del os.environ[VISIBLE]
        if before is not None:
            os.environ[VISIBLE] = before


def _called(name: str) -> str:
    """The process of the program of that name, which may be called as an actor is."""
    return f"programs.{name}"


def _last(child: Child) -> str:
    return f"its last words: {child.last_words() or 'none'}; all of them: {child.stderr}"
