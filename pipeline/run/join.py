"""`penstock join`: this machine's processes of a run that another machine has begun, by the run's folder.

A run may move: its broker, with all that it needs in the folder, is started again on another machine. Whoever has
joined waits for that, as long as its patience lasts, and starts its processes anew.
"""

from __future__ import annotations

import signal
import time
from contextlib import closing
from pathlib import Path

from rich.console import Console

from penstock.pipeline.config import Config, ConfigError, load
from penstock.pipeline.observe import client
from penstock.pipeline.resources.placement import joining_guests, seated
from penstock.pipeline.run.command import penstock
from penstock.pipeline.run.folder import address_of, client_file, run_key
from penstock.pipeline.run.forking import fork_server
from penstock.pipeline.run.launcher import BROKER_SILENT_S, CHECKPOINT_S, DRAIN_S, STATUS_EVERY_S, RunError, ends
from penstock.pipeline.run.serve import environment
from penstock.pipeline.run.summary import check_run
from penstock.pipeline.run.supervisor import Supervisor
from penstock.protocols import keys
from penstock.protocols.mailbox import DeadlineError, Mailbox, RefusedError
from penstock.protocols.messages import ENDED
from penstock.protocols.run_lock import came_to, read_summary
from penstock.services.runtime import logs, registry
from penstock.services.runtime.gpus import visible_gpus
from penstock.services.runtime.registry import ActorSpec
from penstock.services.weights.transports import shared_memory

OTHER_S = 15.0
"""More than somebody is missed after."""
RETRY_S = 1.0
"""Between two looks for a broker."""


def join(
    console: Console, folder: Path, kind: str, count: int | None, name: str, patience_s: float, overrides: list[str],
    failed_patience_s: float = 0.0,
) -> bool:  # fmt: skip
    """Runs ``count`` processes of ``kind`` (None: as many as this machine's GPUs take) until the run in ``folder`` is
    over; ``name`` tells them from other machines'. Returns whether it is: False where one of `ends` came first. For
    ``failed_patience_s`` it waits for who goes on with a run that has failed, or was complete before. Raises
    `FailedError` where nobody goes on with one that has failed, `NobodyError` where no broker of it answered for
    ``patience_s``, and `ConfigError`."""
    if not folder.is_dir():
        check_run(folder)
    if (folder / "config.yaml").is_file():
        _spec(load(folder / "config.yaml", overrides), kind)
    logs.configure(folder.name, f"join-{kind}-{name}", folder / "logs" / f"join-{kind}-{name}.jsonl", "info")
    interrupted: list[int] = []
    previous = {number: signal.signal(number, lambda n, _f: interrupted.append(n)) for number in ends()}
    try:
        return _Join(console, folder, kind, count, name, patience_s, overrides, interrupted, failed_patience_s).run()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class NobodyError(RunError):
    """No broker of the run was at work for as long as there was patience."""


class FailedError(RunError):
    """The run has failed, and nobody has gone on with it."""


class _Join:
    """See `join`."""

    def __init__(
        self,
        console: Console,
        folder: Path,
        kind: str,
        count: int | None,
        name: str,
        patience_s: float,
        overrides: list[str],
        interrupted: list[int],
        failed_patience_s: float,
    ) -> None:
        self._console, self._folder, self._kind, self._count = console, folder, kind, count
        self._name, self._patience_s, self._overrides = name, patience_s, overrides
        self._failed_patience_s = failed_patience_s
        self._interrupted = interrupted
        """Signals that came, one after the other."""
        self._other: client.AnotherRunError | None = None
        """What is where the run's broker was."""
        self._address = ""
        """Where that listened when we last looked."""
        self._over = came_to(folder) is not None
        """The run was, before we came; or has not gone on since."""

    def run(self) -> bool:
        try:
            while mailbox := self._reach():
                self._over = False
                with closing(mailbox):
                    self._work(mailbox)
        except RefusedError as refused:  # of another Penstock, say
            raise ConfigError(f"the broker at {self._address} refuses: {refused}") from None
        if self._interrupted:
            return False
        summary = read_summary(self._folder)
        assert summary
        if summary["outcome"] == "failed":
            raise FailedError(f"the run in {self._folder} has failed: {summary.get('error')}")
        self._say(f"the run is complete: {summary['steps']} steps")
        return True

    def _reach(self) -> Mailbox | None:
        """An observer's mailbox at a broker that is at work; None where the run is over, or we are told to leave."""
        begun, told = time.monotonic(), False
        deadline = begun + self._patience_s
        while not self._interrupted:
            summary = came_to(self._folder)
            # A run that was over before we came may be about to go on: who does that may have begun when we did.
            over = summary and (summary["outcome"] == "failed" or (self._over and summary["outcome"] == "complete"))
            again = over and time.monotonic() < begun + self._failed_patience_s
            if summary and summary["outcome"] != "interrupted" and not again:
                return None
            if mailbox := self._answering():
                return mailbox
            if time.monotonic() > deadline:
                raise NobodyError(self._nobody())
            if not told:
                self._say(f"waiting for the broker of the run in {self._folder}, for {self._patience_s:g} s at most …")
                told = True
            time.sleep(RETRY_S)
        return None

    def _answering(self) -> Mailbox | None:
        found = address_of(self._folder)
        if found is None or not (self._folder / "config.yaml").is_file():
            return None
        self._address = found
        own = client_file(self._folder)
        pair = keys.load_client(own) if own else None
        mailbox, at_work = None, False
        try:
            mailbox = client.join(self._address, pair)
            at_work = client.state(mailbox, self._folder)["phase"] not in ENDED
            self._other = None
        except DeadlineError:
            pass
        except client.AnotherRunError as other:  # ours may move, and write where it is
            self._other = other
        finally:
            if mailbox and not at_work:
                mailbox.close()
        return mailbox if at_work else None

    def _nobody(self) -> str:
        waited = f"no broker of the run in {self._folder} was at work within {self._patience_s:g} s (--patience)"
        if not self._address:
            return f"{waited}: none has listened; start the run, or give the folder that it runs in"
        if self._other:
            return f"{waited}: {self._other}"
        if keys.is_loopback(self._address):
            return (
                f"{waited}: its last one, at {self._address}, was for its own machine alone; start the run with "
                "broker.bind=tcp://NETWORK:0 weights.host=NETWORK, e.g. 10.1.0.0/16"
            )
        return f"{waited}: its last one was at {self._address}; go on with: penstock run --resume {self._folder}"

    def _work(self, mailbox: Mailbox) -> None:
        """Until the broker behind ``mailbox`` is gone, or the run ends."""
        config = load(self._folder / "config.yaml", self._overrides)
        spec = _spec(config, self._kind)
        if spec.single and spec.nodes(config) == 1:
            self._wait_for_the_other(mailbox, spec.kind, config.broker.dead_after_s)
        if self._interrupted:
            return
        every = [(spec, self._names(spec, shares(spec, config, visible_gpus(), self._count)))]
        every += self._guests(config, every[0][1]) if spec.kind == "trainer" else []
        preloaded = any(each.preloaded(config) for each, _ in every)
        forks = fork_server(self._log(f"join-{self._kind}-{self._name}-forkserver")) if preloaded else None
        supervisor = Supervisor(config.run.max_restarts, forks)
        address = self._address
        try:
            for each, placed in every:
                for name, gpus in placed.items():
                    self._start(supervisor, each, config, name, gpus, address)
            self._say(f"joined the run at {address}: {', '.join(child.name for child in supervisor.children)}")
            # One that waits for another machine's ranks is not heard of; ranks that hang give up by themselves.
            self._watch(supervisor, mailbox, spec.kind if spec.nodes(config) > 1 else "", spec.learns)
        finally:
            supervisor.stop(spec.grace_s, lambda: len(self._interrupted) > 1)
            if spec.kind == "trainer":
                shared_memory.remove_leftovers(run_key(self._folder))
        if self._interrupted:
            self._say(f"told to leave: {', '.join(child.name for child in supervisor.children)} left the run")

    def _wait_for_the_other(self, mailbox: Mailbox, kind: str, dead_after_s: float) -> None:
        """A run has one ``kind``: two would take each other's place again and again. One that has just died is missed
        after a while. Raises `RunError` where it is at work."""
        deadline = time.monotonic() + dead_after_s + OTHER_S
        while not self._interrupted:
            try:
                members = client.state(mailbox, self._folder)["members"]
            except (DeadlineError, client.AnotherRunError):
                return  # as is seen while it is watched
            other = next((member for member in members.values() if member["kind"] == kind), None)
            if other is None:
                return
            if time.monotonic() > deadline:
                raise RunError(f"ACTOR: the run has its {kind}, at work on {other['host']}; end that one first")
            time.sleep(RETRY_S)

    def _start(
        self, supervisor: Supervisor, spec: ActorSpec, config: Config, name: str, gpus: str, address: str
    ) -> None:
        command = penstock("serve", spec.kind, "--config", str(self._folder / "config.yaml"))
        command += ["--folder", str(self._folder), "--name", name, "--broker", address, "--supervised"]
        env = environment(spec, config) | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})
        log = self._log(name if spec.nodes(config) == 1 else f"{name}-{self._name}")
        supervisor.start(name, [*command, *self._overrides], log, env, preloaded=spec.preloaded(config))

    def _guests(self, config: Config, trainer: dict[str, str]) -> list[tuple[ActorSpec, dict[str, str]]]:
        """Whoever shares this machine's part of the ``trainer``'s GPUs, with these, by its name."""
        gpus = [gpu for each in trainer.values() for gpu in each.split(",") if gpu]
        specs, counts = registry.actors(config), joining_guests(config)
        names = {kind: [f"{kind}-{self._name}-{index}" for index in range(count)] for kind, count in counts.items()}
        wanted = {name: specs[kind].gpus(config) for kind, mine in names.items() for name in mine}
        placed = seated(config, gpus, wanted)
        return [(specs[kind], {name: placed[name] for name in mine}) for kind, mine in names.items()]

    def _watch(self, supervisor: Supervisor, mailbox: Mailbox, waits: str, learns: bool) -> None:
        """``waits``: which of the processes is not heard of as long as it waits for other machines. ``learns``: one of
        them is a learner."""
        silent_s, restarts = 0.0, 0
        while not self._interrupted:
            if error := supervisor.poll():
                raise RunError(error)
            if supervisor.restarts > restarts:
                restarts = supervisor.restarts
                self._say(f"{restarts} times a process has died here and was started again")
            asked = time.monotonic()
            try:
                state = client.state(mailbox, self._folder)
                silent_s = 0.0
            except client.AnotherRunError:
                if read_summary(self._folder) or (silent_s := silent_s + RETRY_S) > BROKER_SILENT_S:
                    return
                time.sleep(RETRY_S)
                continue
            except DeadlineError:
                silent_s += min(time.monotonic() - asked, client.DEADLINE_S)  # it may have been stopped itself
                if mailbox.heard_at > asked:  # it waits for its store
                    silent_s = 0.0
                if silent_s > BROKER_SILENT_S or read_summary(self._folder):
                    return
                continue
            for name, lost_s in state["lost"].items():
                if name != waits:
                    supervisor.end_wedged(name, lost_s)
            if state["phase"] in ENDED:
                self._drain(supervisor, learns)
                return
            time.sleep(STATUS_EVERY_S)

    def _drain(self, supervisor: Supervisor, learns: bool) -> None:
        """Until all have left; a learner may have a large checkpoint to write."""
        deadline = time.monotonic() + (CHECKPOINT_S if learns else DRAIN_S)
        while supervisor.wait({child.name for child in supervisor.children}, STATUS_EVERY_S):
            if self._interrupted or time.monotonic() > deadline:
                return

    def _names(self, spec: ActorSpec, placed: list[str]) -> dict[str, str]:
        """The GPUs of each process, by its name."""
        if spec.single:
            return {spec.kind: placed[0]}
        return {f"{spec.kind}-{self._name}-{index}": gpus for index, gpus in enumerate(placed)}

    def _log(self, name: str) -> Path:
        return self._folder / "logs" / f"{name}.stderr"

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def shares(spec: ActorSpec, config: Config, gpus: list[str], count: int | None) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each of ``count`` processes; empty where there is no GPU, or they want none. None: as
    many as ``gpus`` take. Raises `ConfigError` where those are too few."""
    if spec.single and (count or 1) > 1:
        raise ConfigError(f"--count: a run has one {spec.kind}; its ranks are {spec.kind}.ranks")
    each = spec.gpus(config) // spec.nodes(config) if gpus else 0
    if count is None:
        count = 1 if spec.single or not each else len(gpus) // each
    if count * each > len(gpus) or not count:
        raise ConfigError(
            f"--count: {max(1, count)} x {spec.kind} want {max(1, count) * each} GPUs, and this machine has {len(gpus)}"
        )
    return [",".join(gpus[index * each : (index + 1) * each]) for index in range(count)]


def _spec(config: Config, kind: str) -> ActorSpec:
    specs: dict[str, ActorSpec] = registry.actors(config)
    joining = [name for name in specs if name != "broker"]
    if kind not in joining:
        raise ConfigError(f"ACTOR: {kind!r} is not one of {', '.join(joining)}")
    if not specs[kind].count(config):
        raise ConfigError(f"ACTOR: this run needs no {kind}: {specs[kind].unneeded}")
    return specs[kind]
