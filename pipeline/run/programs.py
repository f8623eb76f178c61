"""The programs of others that a run starts beside itself (`programs`): ready before anything else, ended last."""

from __future__ import annotations

import http.client
import os
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import typer
from rich.console import Console

from penstock.pipeline.config import Config, ConfigError
from penstock.pipeline.config.programs import RUN, ProgramConfig
from penstock.pipeline.resources.gpus import gpus_of_programs
from penstock.pipeline.run.supervisor import Child, Supervisor
from penstock.services.runtime import logs
from penstock.services.runtime.gpus import VISIBLE, visible_gpus
from penstock.services.runtime.guard import guarded
from penstock.services.runtime.user_folders import folder_of

ASK_S, ANSWER_S = 0.3, 2.0
"""Between two looks at whether a program is ready; and for it to say so."""
STOP_S, LEAVE_S = 10.0, 5.0
"""More than its guard gives it; and for one of a start before, which was killed, to be gone."""


class Programs:
    """Those of ``config``; ``gpus``: CUDA_VISIBLE_DEVICES of each that has some. What they say is in ``logs``."""

    def __init__(self, config: Config, gpus: dict[str, str], logs: Path) -> None:
        self._configs, self._gpus, self._logs = config.programs, gpus, logs
        self._supervisor = Supervisor(config.run.max_restarts)

    @property
    def children(self) -> list[Child]:
        """Their processes."""
        return self._supervisor.children

    def start(self, console: Console) -> None:
        """Returns once all are ready. Raises `ConfigError`, which says why one is not."""
        logs.silence()
        patient = time.monotonic() + LEAVE_S
        for name, program in self._configs.items():
            while program.ready and _answers(program.ready):
                if time.monotonic() < patient:
                    time.sleep(ASK_S)
                    continue
                raise ConfigError(
                    f"programs.{name}.ready: {program.ready} answers before the program is started, so another one is "
                    "there: end that, or take another port"
                )
        first = {name: program for name, program in self._configs.items() if not program.of_run}
        for name, program in first.items():
            self._start(name, program, program.words)
        for child, program in zip(self.children, first.values(), strict=True):
            self._wait_for(child, program, console)

    def begin(self, run: Path) -> None:
        """The run in the folder ``run`` is under way: starts those that are told of it."""
        for name, program in self._configs.items():
            if program.of_run:
                self._start(name, program, [str(run) if word == RUN else word for word in program.words])

    @property
    def restarts(self) -> int:
        """How often they were started again."""
        return self._supervisor.restarts

    def poll(self) -> str | None:
        """Starts again what died; returns an error where one cannot go on."""
        self._supervisor.poll()
        child = next((child for child in self.children if child.fatal), None)
        return f"programs.{child.name}: {child.fatal}" if child else None

    def move(self, logs: Path) -> None:
        """What they say is in ``logs`` from now on, of the same disk."""
        if not self._configs or logs == self._logs:
            return
        logs.mkdir(parents=True, exist_ok=True)
        for child in self.children:
            child.stderr = child.stderr.rename(logs / child.stderr.name)
        self._logs.rmdir()
        self._logs = logs

    def close(self) -> None:
        """Ends them all."""
        self._supervisor.stop(STOP_S)

    def _start(self, name: str, program: ProgramConfig, words: list[str]) -> None:
        beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        env = {"PATH": beside, VISIBLE: self._gpus.get(name, ""), **program.env}
        command, log = guarded(words, [*os.environ, *env]), self._logs / f"program-{name}.stderr"
        self._supervisor.start(name, command, log, env, foreign=True, folder=folder_of(words))

    def _wait_for(self, child: Child, program: ProgramConfig, console: Console) -> None:
        if not program.ready:
            return
        words = f"waiting for programs.{child.name} ({program.ready}) …"
        if not console.is_terminal:  # where a status shows nothing
            typer.echo(words, err=True)
        deadline = time.monotonic() + program.ready_s
        with console.status(words):
            while not _answers(program.ready):
                process = child.process
                if process is None or process.poll() is not None:
                    code = f" with exit code {process.returncode}" if process else ""
                    raise ConfigError(f"programs.{child.name} ended{code} before it was ready; {_last(child)}")
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"programs.{child.name}.ready: {program.ready} did not answer within {program.ready_s:g} s "
                        f"(programs.{child.name}.ready_s); {_last(child)}"
                    )
                time.sleep(ASK_S)


@contextmanager
def started(config: Config, folder: Path, made: bool, console: Console) -> Iterator[Programs]:
    """The programs of a run in ``folder``, ready, with GPUs that nobody else sees meanwhile. Where that folder is not
    ``made`` yet, what they say goes beside it until `Programs.move`. Raises `ConfigError`."""
    if lacking := too_few_gpus(config):
        raise ConfigError(lacking)
    with of_their_own(config) as gpus, _logs(config, folder, made) as logs:
        programs = Programs(config, gpus, logs)
        try:
            programs.start(console)
            yield programs
        finally:
            programs.close()


@contextmanager
def _logs(config: Config, folder: Path, made: bool) -> Iterator[Path]:
    if made or not config.programs:
        yield folder / "logs"
        return
    there = next(above for above in folder.absolute().parents if above.is_dir())
    try:
        aside = tempfile.TemporaryDirectory(prefix=".programs-", dir=there)
    except OSError as error:
        raise ConfigError(f"run.folder: cannot write to {there}: {error.strerror}; choose another folder") from None
    with aside:
        yield Path(aside.name)


def too_few_gpus(config: Config) -> str:
    """Why this machine has too few GPUs for the programs; empty: it has enough."""
    wanted = gpus_of_programs(config)
    there = len(visible_gpus()) if wanted else 0
    if not wanted or there > wanted or (there == wanted and config.trainer.device == "cpu"):
        return ""
    many = ", ".join(f"{name} {program.gpus}" for name, program in config.programs.items() if program.gpus)
    return (
        f"programs: they want {wanted} GPUs of their own ({many}), and this machine has {there}, of which the run "
        "itself needs some: give them fewer (programs.NAME.gpus), or start them on another machine yourself"
    )


@contextmanager
def of_their_own(config: Config) -> Iterator[dict[str, str]]:
    """CUDA_VISIBLE_DEVICES of each program that wants GPUs: the last ones, where there are enough. This process, and
    what it starts, sees the others alone meanwhile."""
    if not gpus_of_programs(config) or too_few_gpus(config):
        yield {}
        return
    left, before, found = visible_gpus(), os.environ.get(VISIBLE), {}
    for name, program in config.programs.items():
        if program.gpus:
            found[name], left = ",".join(left[-program.gpus :]), left[: -program.gpus]
    os.environ[VISIBLE] = ",".join(left)
    try:
        yield found
    finally:
        del os.environ[VISIBLE]
        if before is not None:
            os.environ[VISIBLE] = before


def _last(child: Child) -> str:
    return f"its last words: {child.last_words() or 'none'}"


def _answers(url: str) -> bool:
    parts = urlsplit(url)
    try:
        if parts.scheme == "tcp":
            assert parts.hostname and parts.port
            socket.create_connection((parts.hostname, parts.port), ANSWER_S).close()
            return True
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(url, timeout=ANSWER_S) as answer:
            return bool(answer.status < 400)
    except (OSError, http.client.HTTPException, ValueError):  # a status is an OSError
        return False
