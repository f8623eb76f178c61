"""A run as an object: started by `Trainer`, or found by its folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.pipeline.config import ConfigError
from penstock.pipeline.config.load import as_overrides
from penstock.pipeline.run.command import penstock
from penstock.pipeline.run.folder import address_file, address_of, named
from penstock.pipeline.run.lock import is_live
from penstock.pipeline.run.summary import check_run, steps_in, steps_of
from penstock.pipeline.tools.rollouts import rollouts
from penstock.protocols.mailbox import DeadlineError
from penstock.protocols.run_lock import came_to, holder
from penstock.services.runtime.checkpoint_folders import latest
from penstock.services.runtime.lines import rows_behind
from penstock.services.runtime.user_folders import VARIABLE, listed

FOLDERS, OUTPUT = "folders.json", "output.log"
"""In a run's `script_folder`: where modules of the script lie, and what the command has said."""
POLL_S = 0.5
OnStep = Callable[[dict[str, Any]], None]
Stamps = dict[str, tuple[int, int] | None]
"""Inode and time (ns) of a file, by its name; None where there is none."""


class RunFailed(RuntimeError):
    """A run that ended before it was complete; says why, and where its logs are."""


class Run:
    """The run in ``folder``: under way, stopped, or over."""

    def __init__(
        self, folder: str | Path, process: subprocess.Popen[bytes] | None = None, before: Stamps | None = None
    ) -> None:
        self.folder = named(Path(folder))
        self._process, self._before = process, before or {}
        """``process``: of the `penstock run` that has been started; ``before``: `stamps` from before it was."""
        self._told = self._read = 0
        """The step that `wait` tells next, and how far metrics.jsonl was read for it, in bytes."""
        if process is None:
            check_run(self.folder, "Run")

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {'running' if self.running else 'not running'}, steps={len(self.steps)})"

    @property
    def running(self) -> bool:
        """Its processes are there: here, or on another machine."""
        return self._supervisor() is not None or (self._process is None and is_live(self.folder))

    @property
    def summary(self) -> dict[str, Any] | None:
        """What it came to, of a run that is over; else None, also while one that goes on has not begun yet."""
        return None if self._is_of_before("summary.json") else came_to(self.folder)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The metrics of its steps up to now, a map each. docs/metrics.md says what they mean."""
        return steps_of(self.folder)

    @property
    def metrics(self) -> Any:
        """The same as a `pandas.DataFrame`, by step. Needs pandas."""
        import pandas

        found = pandas.DataFrame(self.steps)
        return found.set_index("step") if len(found) else found

    @property
    def checkpoint(self) -> Path | None:
        """The newest one, in transformers' layout (with `trainer.lora` in peft's)."""
        return latest(self.folder / "checkpoints")

    def rollouts(self, step: int | None = None) -> list[dict[str, Any]]:
        """Every trajectory that was trained on, of all archived steps or of one: a flat map each. Raises `ConfigError`
        where `replay.archive` has not kept them."""
        return list(rollouts(self.folder, step))

    def status(self) -> dict[str, Any]:
        """How it stands, as `penstock status --json` says it. Of a run that is under way, while no broker answers,
        little more than the phase: ``preparing`` before there is one, ``ending`` after. Raises `ConfigError`."""
        if (over := self.summary) is not None:
            return over
        if self.running and (self._is_of_before(address_file(self.folder).name) or address_of(self.folder) is None):
            return self._phase("preparing")
        from penstock.pipeline.observe.client import SilentError, find_broker, state, watching

        try:
            with watching(*find_broker(self.folder, None, None)) as mailbox:
                return state(mailbox, self.folder, whole=True)
        except (SilentError, DeadlineError):
            running, over = self.running, self.summary
            if over is None and not running:
                raise
            return over or self._phase("ending")

    def _phase(self, phase: str) -> dict[str, Any]:
        steps = self.steps
        last = steps[-1] if steps else {}
        return {"run": self.folder.name, "phase": phase, "step": len(steps), "metrics": last, "members": {}}

    def _is_of_before(self, name: str) -> bool:
        """The file was there before the process that was started, and that has not begun, or never did."""
        process = self._process
        return process is not None and process.poll() != 0 and self._before.get(name) == _stamp(self.folder / name)

    def wait(self, seconds: float | None = None, on_step: OnStep = lambda row: None) -> dict[str, Any]:
        """Until it is over; ``on_step`` is called with each step's metrics as it is complete, by several waits once,
        and of what `resume` goes on with for its own steps. Returns the summary. Raises `RunFailed`, and
        `TimeoutError` after ``seconds``: the run goes on."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            running = self.running
            new, read = rows_behind(self.folder / "metrics.jsonl", self._read)
            for row in steps_in(new):
                if row["step"] >= self._told:
                    self._told = row["step"] + 1
                    on_step(row)
            self._read = read
            if not running:
                return self._over()
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.folder}: not over after {seconds:g} s, at step {self._told}; it goes on")
            time.sleep(POLL_S)

    def stop(self, seconds: float | None = None) -> dict[str, Any] | None:
        """Has it drain, save a checkpoint and end, and waits for that, which may take as long as a large checkpoint
        does; `resume` goes on with it. Returns the summary, where there is one. Raises `TimeoutError` after
        ``seconds``: it is still ending; and `ConfigError` where that must be done on another machine."""
        if (supervisor := self._supervisor()) is not None:
            os.kill(supervisor, signal.SIGINT)
        elif self.running:
            address = address_of(self.folder)
            at = f" (its broker is at {address})" if address else ""
            raise ConfigError(
                f"stop: the run in {self.folder} is under way, but not by a penstock run of this machine{at}; end it "
                "where it was started, e.g. with Ctrl-C there"
            )
        deadline = None if seconds is None else time.monotonic() + seconds
        while self.running:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(
                    f"{self.folder}: not ended {seconds:g} s after it was asked to; it drains and saves a checkpoint"
                )
            time.sleep(POLL_S)
        return self.summary

    def resume(self, overrides: dict[str, Any] | None = None) -> Run:
        """Goes on with it, e.g. ``run.resume({"trainer.steps": 300})``. Raises `ConfigError` where it is under way."""
        if self.running:
            raise ConfigError(f"resume: the run in {self.folder} is under way; stop() it first")
        command = penstock("run", "--resume", str(self.folder), *as_overrides(overrides or {}))
        begun = rows_behind(self.folder / "metrics.jsonl", 0)
        run = launched(command, self.folder)
        run._told, run._read = max((row["step"] + 1 for row in steps_in(begun[0])), default=0), begun[1]
        return run

    def _over(self) -> dict[str, Any]:
        code = self._process.returncode if self._process else 0
        summary = self.summary
        if code in (0, 130) and summary is not None and summary["outcome"] != "failed":
            return summary
        output = script_folder(self.folder) / OUTPUT
        said = output.read_text(errors="replace") if self._process and output.is_file() else ""
        reason = said[at:] if (at := said.rfind("error: ")) >= 0 else said[-2000:]
        reason = reason or (summary or {}).get("error", "")
        if self.summary is None and code == 0:
            reason = reason or "it was ended from outside; resume() goes on with it"
        raise RunFailed(f"{self.folder}: {reason.strip() or f'exit code {code}'}")

    def _supervisor(self) -> int | None:
        """The process of `penstock run`."""
        if self._process is not None:
            return self._process.pid if self._process.poll() is None else None
        return holder(self.folder)


def stamps(folder: Path) -> Stamps:
    """Which files of an earlier start lie in ``folder`` that say how it stood."""
    return {name: _stamp(folder / name) for name in ("summary.json", address_file(folder).name)}


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def script_folder(folder: Path) -> Path:
    """What a script has given the run in ``folder``: config, functions, rows."""
    return folder.with_name(f"{folder.name}.script")


def launched(command: list[str], folder: Path) -> Run:
    """The run that ``command`` starts in ``folder``; what it says goes into ``output.log`` of its `script_folder`. It
    finds what the script's own modules are."""
    own = script_folder(folder)
    own.mkdir(parents=True, exist_ok=True)
    modules = json.loads((own / FOLDERS).read_text()) if (own / FOLDERS).is_file() else []
    known = [str(own.resolve()), *modules, *listed(VARIABLE)]
    env = os.environ | {VARIABLE: json.dumps(list(dict.fromkeys(known)))}
    before = stamps(folder)
    with (own / OUTPUT).open("wb") as file:  # in a session of its own: Ctrl-C is handed on once, by `wait`'s caller
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=env)
    return Run(folder, process, before)
