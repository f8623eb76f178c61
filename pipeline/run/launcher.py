"""`penstock run`: one run on this machine, from its start to its end."""

from __future__ import annotations

import math
import os
import select
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console

from penstock.pipeline.config import Config, TinyModel
from penstock.pipeline.observe import client
from penstock.pipeline.observe.terminal import View
from penstock.pipeline.resources.placement import place
from penstock.pipeline.run import preparing
from penstock.pipeline.run.command import penstock
from penstock.pipeline.run.finish import conclude
from penstock.pipeline.run.folder import client_file, run_key, run_name
from penstock.pipeline.run.forking import fork_server
from penstock.pipeline.run.programs import Programs
from penstock.pipeline.run.redis_server import PrivateRedis
from penstock.pipeline.run.serve import environment
from penstock.pipeline.run.supervisor import Child, Supervisor
from penstock.protocols.keys import load_client
from penstock.protocols.mailbox import LATE_S, DeadlineError, Mailbox, RefusedError, answer_to, incarnation_of
from penstock.protocols.messages import (
    Heartbeat,
    Hello,
    LedgerReply,
    LedgerRequest,
    Message,
    Status,
    StatusRequest,
    StopRun,
)
from penstock.services.broker.store import is_loading
from penstock.services.runtime import logs, registry
from penstock.services.runtime.gpus import visible_gpus
from penstock.services.runtime.registry import ActorSpec
from penstock.services.weights.transports import shared_memory

log = structlog.get_logger()

BROKER_START_S, BROKER_LOOKS = 90.0, 4.0
"""For the broker to listen; and how many times as long as a look at everything took, since it opens the data too."""
STATUS_EVERY_S = 0.5
BROKER_WEDGED_S, BROKER_SILENT_S = 40.0, 60.0
"""A broker that says nothing for so long is ended, and another one begins; or nothing helps. Actors give up later."""
DRAIN_S, CHECKPOINT_S, TERM_S = 120.0, 3600.0, registry.LEARNERS_GRACE_S
"""For the work in hand; for learners, which may have a large checkpoint to write; and for them after SIGTERM."""
STOP_S = 30.0
ONCE_S = 0.5
"""Signals that come so soon behind each other are one."""


LEAST_DISK = 16 << 20
"""Bytes; a disk with less is full: what a group takes may be more than is left."""


class RunError(RuntimeError):
    """The run could not go on; says why."""


class InterruptedRunError(RunError):
    """It was interrupted, and has no summary: before it began, or a second time, which ends it at once."""


def run(config: Config, folder: Path, console: Console, programs: Programs, looked_s: float = 0.0) -> dict[str, Any]:
    """Runs everything, beside ``programs`` that are there already; returns the summary. ``looked_s``: so long it took
    to look at the data, among others, which the broker opens once more. Raises `RunError` or a `SetupError`."""
    logs.configure(run_name(folder), "supervisor", folder / "logs" / "supervisor.jsonl", config.run.log_level)
    interrupted: list[int] = []
    launch = _Launch(config, folder, console, programs, interrupted, BROKER_START_S + BROKER_LOOKS * looked_s)
    heard_at = -math.inf

    def hear(number: int, _frame: object) -> None:
        """`timeout`, and others that start it, signal it and then its whole group: that is once."""
        nonlocal heard_at
        before, heard_at = heard_at, time.monotonic()
        if heard_at - before > ONCE_S:
            interrupted.append(number)

    previous = {number: signal.signal(number, hear) for number in ends()}
    try:
        return launch.run()
    finally:
        launch.close()
        for number, handler in previous.items():
            signal.signal(number, handler)


def ends() -> tuple[int, ...]:
    """Signals that end a run in good order: Ctrl-C, SIGTERM, and that its terminal is gone, unless that is to be
    ignored (nohup)."""
    gone = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *gone)


class _Launch:
    """One run's processes and the connection to its broker."""

    def __init__(
        self, config: Config, folder: Path, console: Console, programs: Programs, interrupted: list[int],
        start_s: float,
    ) -> None:  # fmt: skip
        self._config, self._folder, self._console, self._programs = config, folder, console, programs
        self._start_s = start_s
        """That the broker has, to listen."""
        self._interrupted = interrupted
        """Signals that came, one after the other."""
        self._redis: PrivateRedis | None = None
        self._mailbox: Mailbox | None = None
        self._told: dict[str, int] = {}
        self._gpus = place(config, visible_gpus())
        preloaded = any(spec.preloaded(config) and spec.count(config) for spec in registry.started_here(config))
        forks = fork_server(self._stderr("forkserver")) if preloaded else None
        self._supervisor = Supervisor(config.run.max_restarts, forks)

    def run(self) -> dict[str, Any]:
        self._prepare()
        with self._console.status("starting the broker, and all others …"):
            if error := self._programs.rest(self._folder, self._hear_interrupt):
                raise RunError(error)
            store = self._config.store.url or self._start_redis()
            address = self._start_broker(store)
            for spec in registry.started_here(self._config):
                for name in spec.names(self._config):
                    self._start(spec, name, ["--broker", address])
            self._say_hello(address)
        self._programs.begin(self._folder.resolve())
        with View(self._console, f"penstock {run_name(self._folder)}") as view:
            error, outcome = self._watch(view)
            return self._finish(view, error, outcome)

    def close(self) -> None:
        """Leaves no process behind."""
        if self._mailbox:
            self._mailbox.close(linger_s=0.1)  # what it asked was answered, and the broker may be gone
        forced = self._supervisor.stop(STOP_S, lambda: len(self._interrupted) > 1)
        if forced:
            log.warning("ended by force", children=forced)
        shared_memory.remove_leftovers(run_key(self._folder))
        if self._redis:
            self._redis.remove()

    # --- starting ----------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        if not isinstance(self._config.model, TinyModel) or (self._folder / "model" / "config.json").is_file():
            return
        command = penstock("prepare", str(self._folder / "config.yaml"))
        child = self._supervisor.start(
            "prepare",
            [*command, "--folder", str(self._folder), "--looked"],
            self._stderr("prepare"),
            restartable=False,
            foreign=True,
            preloaded=True,
        )
        words = "making the tiny model; its warm start is supervised (about 20 s) …"
        if not self._config.model.warm_start.steps:
            words = "making the tiny model …"
        preparing.watch(self._console, child, words, self._hear_interrupt)
        if child.process and child.process.returncode:
            raise RunError(f"the model could not be made: {child.last_words()}")
        child.done = True

    def _start_redis(self) -> str:
        self._redis = PrivateRedis(self._folder, self._config.store.fsync)
        self._supervisor.start("redis", self._redis.command, self._stderr("redis"), foreign=True)
        return self._redis.url

    def _start_broker(self, store: str) -> str:
        read, write = os.pipe()
        try:
            # By environment: a command line, with the password in the URL, is for everyone to read.
            env = {"PENSTOCK_STORE": store}
            arguments = ["--ready-fd", str(write)]
            child = self._start(registry.actors(self._config)["broker"], "broker", arguments, env, pass_fds=(write,))
        finally:
            os.close(write)
        try:
            deadline = time.monotonic() + self._start_s
            while not select.select([read], [], [], 0.1)[0]:
                self._hear_interrupt()
                error = self._supervisor.poll()
                if time.monotonic() > deadline - 1 and is_loading(store):
                    deadline = time.monotonic() + self._start_s
                if error or time.monotonic() > deadline:
                    raise RunError(error or f"the broker did not start within {self._start_s:.0f} s")
            address = os.read(read, 4096).decode().strip()
        finally:
            os.close(read)
        if not address:
            child.process and child.process.wait(10)
            raise RunError(self._supervisor.poll() or f"the broker ended before it listened: {child.last_words()}")
        # Started again, it listens where the others look for it.
        ready = child.command.index("--ready-fd")
        del child.command[ready : ready + 2]
        child.command.append(f"broker.bind={self._bound(address)}")
        return address

    def _bound(self, address: str) -> str:
        """What a broker that is reached at ``address`` binds once more: the same host, and now the same port."""
        bind = self._config.broker.bind
        if self._config.broker.advertise:  # of what lies in between, whose port may be another
            return bind
        return f"{bind.rpartition(':')[0]}:{address.rpartition(':')[2]}"

    def _start(
        self,
        spec: ActorSpec,
        name: str,
        arguments: list[str],
        env: dict[str, str] | None = None,
        pass_fds: tuple[int, ...] = (),
    ) -> Child:
        command = penstock("serve", spec.kind, "--config", str(self._folder / "config.yaml"))
        command += ["--folder", str(self._folder), "--name", name, "--supervised", *arguments]
        gpus = {"CUDA_VISIBLE_DEVICES": self._gpus[name]} if name in self._gpus else {}
        env = environment(spec, self._config) | gpus | (env or {})
        preloaded = spec.preloaded(self._config)
        return self._supervisor.start(name, command, self._stderr(name), env, pass_fds=pass_fds, preloaded=preloaded)

    def _stderr(self, name: str) -> Path:
        return self._folder / "logs" / f"{name}.stderr"

    def _say_hello(self, address: str) -> None:
        own = client_file(self._folder)
        keys = load_client(own) if own else None
        self._mailbox = Mailbox(address, incarnation_of("supervisor"), keys)
        hello = Hello(kind="observer", name="supervisor", host="", pid=os.getpid())
        self._mailbox.hello = lambda: [hello]
        self._mailbox.beat = Heartbeat
        try:
            self._insist(hello, begun=False)
        except (DeadlineError, RefusedError) as late:
            raise RunError(f"the run did not begin; {late}") from None

    # --- watching ----------------------------------------------------------------------------------------------------

    def _hear_interrupt(self) -> None:
        if self._interrupted:
            raise InterruptedRunError("interrupted before the run began")

    def _watch(self, view: View) -> tuple[str | None, str]:
        """Until the run is over; returns the error that ended it, if one did, and the outcome in a word."""
        assert self._mailbox
        silent_s, ended = 0.0, False
        while True:
            error = self._supervisor.poll() or self._programs.poll()
            self._note_restarts(view)
            self._check_disk()
            if error:
                return error, "failed"
            if self._interrupted:
                view.note("interrupted: draining and saving a checkpoint; once more ends it at once …")
                return None, "interrupted"
            asked = time.monotonic()
            try:
                state = client.state(self._mailbox)
                silent_s, ended = 0.0, False
            except DeadlineError as late:
                # No longer than was waited: the time in which this process was stopped is nobody's.
                silent_s += min(time.monotonic() - asked, client.DEADLINE_S)
                if self._mailbox.heard_at > asked:
                    silent_s, ended = 0.0, False
                elif silent_s > BROKER_WEDGED_S and not ended:
                    self._supervisor.end_wedged("broker", silent_s)
                    silent_s, ended = 0.0, True
                elif silent_s > BROKER_SILENT_S:
                    return self._supervisor.poll() or str(late), "failed"
                continue
            view.update(state, self._restarts)
            for name, lost_s in state["lost"].items():
                self._supervisor.end_wedged(name, lost_s)
            if state["phase"] == "done":
                return None, "complete"
            if state["phase"] == "stopping":
                return state["error"] or state["reason"] or "the run was stopped", "failed"
            time.sleep(STATUS_EVERY_S)

    def _check_disk(self) -> None:
        """On a full disk nobody can say anything any more, so it is said here. What was acknowledged is there."""
        if shutil.disk_usage(self._folder).free < LEAST_DISK:
            raise RunError(f"the disk that {self._folder} is on is full; free some space, and go on")

    @property
    def _restarts(self) -> int:
        return self._supervisor.restarts + self._programs.restarts

    def _note_restarts(self, view: View) -> None:
        for child in (*self._supervisor.children, *self._programs.children):
            if child.restarts > self._told.get(child.name, 0):
                self._told[child.name] = child.restarts
                view.note(f"{child.name} died and was started again ({child.restarts}): it {child.died_of}")

    # --- ending ------------------------------------------------------------------------------------------------------

    def _finish(self, view: View, error: str | None, outcome: str) -> dict[str, Any]:
        """Drains, then writes summary and report from what the broker last knew."""
        broker = next(child for child in self._supervisor.children if child.name == "broker")
        if error and not broker.alive:
            raise RunError(error)
        try:
            self._drain(view, broker, "" if outcome == "complete" else error or outcome, failed=bool(error))
            status, ledger = self._insist(StatusRequest(whole=True)), self._insist(LedgerRequest())
            assert isinstance(status, Status) and isinstance(ledger, LedgerReply)
            view.finish(status.state, self._restarts)
            self._insist(StopRun(reason="the supervisor has seen the end", seen=True))
            self._supervisor.wait({"broker"}, STOP_S)
            if self._console.is_terminal:  # where a panel stands still meanwhile
                view.note("writing the summary and the report …")
        except (DeadlineError, RefusedError) as late:
            raise RunError(f"{error or 'the run ended'}; {late}") from None
        summary = conclude(self._folder, status.state, ledger, self._restarts, outcome, error)
        if error:
            raise RunError(error)
        return summary

    def _drain(self, view: View, broker: Child, reason: str, failed: bool) -> None:
        """Waits until all actors have left, after telling the broker to end the run where there is a ``reason`` to,
        which may be that it has ``failed``. Learners may have a large checkpoint to write; whoever has sent
        SIGTERM, a scheduler say, does not wait as long for it as somebody at a terminal."""
        actors = {child.name for child in self._supervisor.children} - {"broker", "redis", "prepare"}
        patience_s = TERM_S if signal.SIGTERM in self._interrupted else CHECKPOINT_S
        told, began, noted_s = -1, time.monotonic(), DRAIN_S
        while True:
            if reason and told != broker.restarts:  # one that was started again knows nothing of it
                self._insist(StopRun(reason=reason, failed=failed))
                told = broker.restarts
            left = self._supervisor.wait(actors, STATUS_EVERY_S)
            self._keep_books()
            learners = self._learners(left)
            if not left and not learners:
                return
            waited_s = time.monotonic() - began
            if waited_s > (patience_s if learners else DRAIN_S):
                names = ", ".join(sorted({*left, *learners}))
                log.warning("not drained in time", children=left, learners=learners)
                view.note(f"not drained within {waited_s:.0f} s, and ended: {names}")
                return
            if waited_s > noted_s:
                view.note(f"waiting for the last checkpoint ({', '.join(learners)}) …")
                noted_s += DRAIN_S

    def _learners(self, left: list[str]) -> list[str]:
        """Learners that have not left: of the processes ``left`` here, and on other machines. What the broker has lost
        is ended."""
        assert self._mailbox
        specs, kinds = registry.actors(self._config), registry.learners(self._config)
        found = {name for kind in kinds for name in specs[kind].names(self._config)}.intersection(left)
        try:
            state = client.state(self._mailbox)
        except DeadlineError:
            return sorted(found)
        for name, silent_s in state["lost"].items():
            self._supervisor.end_wedged(name, silent_s)
        return sorted(found | {name for name, member in state["members"].items() if member["kind"] in kinds})

    def _insist(self, message: Message, begun: bool = True) -> Message:
        """Asks a broker that may die and be started again meanwhile, or wait for its store. Before the run has
        ``begun`` the first Ctrl-C ends it at once."""
        assert self._mailbox
        while True:
            answer, asked = self._mailbox.ask_later(message, BROKER_SILENT_S), time.monotonic()
            while not answer.done() and time.monotonic() < asked + BROKER_SILENT_S + LATE_S:
                if not begun:
                    self._hear_interrupt()
                self._keep_books()
                time.sleep(0.02)
            try:
                return answer_to(answer, 0.0)
            except DeadlineError:
                if time.monotonic() - self._mailbox.heard_at > BROKER_WEDGED_S:
                    raise

    def _keep_books(self) -> None:
        """Broker, store and programs are needed to the last, when nobody else is started again."""
        if len(self._interrupted) > 1:
            raise InterruptedRunError("interrupted twice: ended at once, without a checkpoint of the last steps")
        self._check_disk()
        if broken := self._supervisor.poll({"broker", "redis"}) or self._programs.poll():
            raise RunError(broken)
