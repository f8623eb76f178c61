"""`penstock launch ray`: the run and what joins it as Ray actors, in the bundles of one placement group.

A Ray actor here is one process of ours, and what Ray knows of it is its command line: Ray finds it a machine, gives it
GPUs, and where that machine dies starts it again on another one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from penstock.pipeline.config import ConfigError
from penstock.pipeline.launch.parts import Part, head_arguments, member_arguments
from penstock.pipeline.run.launcher import CHECKPOINT_S, TERM_S
from penstock.pipeline.run.resume import STORE
from penstock.services.runtime.install import install
from penstock.services.runtime.processes import with_parent

ROOM_S = 600.0
"""For the cluster to have room, which it may have to start machines for."""
LEAVE_S = 300.0
"""For those that joined, once the run is over; and for the run beside the time that it has for its last checkpoint."""
HANDED_ON = (
    "HF_*", "HUGGING_FACE_HUB_TOKEN", "WANDB_*", "MLFLOW_*", "*_API_KEY", "NCCL_*", "PENSTOCK_*",
    *(word for name in ("http", "https", "all", "no") for word in (f"{name}_proxy", f"{name}_proxy".upper())),
)  # fmt: skip
"""What the processes of a run have from the shell that launches it: patterns of environment variables."""
OF_ITS_OWN = ("PENSTOCK_HEALTH_FILE", "PENSTOCK_ONE_PER_HOST", "PENSTOCK_CLAIM_GPUS", "PENSTOCK_FOLDERS*", STORE)
"""But what these say is of the launching machine, or its container; or the run's alone."""
LOOK_S = 1.0
AGAIN_S = 10.0
"""Until one that has failed is started again."""

Started = tuple[str, Any, list[str], Any]
"""Name, actor, its command's arguments, and what it will return."""


class Process:
    """A Ray actor: a ``penstock`` command, on the machine that Ray has chosen."""

    def __init__(self, workdir: str, env: dict[str, str], given: tuple[str, ...] = ()) -> None:
        """``env``: environment variables beside those that Ray has on that machine, whose own values count but for
        those that were ``given`` by name."""
        self._workdir, self._env, self._given = workdir, env, given
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped, self._lock = False, threading.Lock()

    def run(self, arguments: list[str]) -> int:
        """Until the command ends; returns its exit code. Ray calls it again where the machine has died meanwhile."""
        command = [sys.executable, "-P", "-m", "penstock.pipeline.cli", *arguments]
        own = {name: value for name, value in os.environ.items() if name not in self._given}
        workdir = self._workdir if Path(self._workdir).is_dir() else None  # that of who launched it, where it is here
        end_with_us = with_parent(signal.SIGTERM)

        def begin() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which Ray has all that it starts block
            if end_with_us:
                end_with_us()

        with self._lock:
            if self._stopped:
                return 130
            self._process = subprocess.Popen(command, cwd=workdir, env=self._env | own, preexec_fn=begin)
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Tells the command to leave, by the signal ``number``."""
        with self._lock:
            self._stopped = True
            if self._process and self._process.poll() is None:
                self._process.send_signal(number)


def handed_on(here: Mapping[str, str], names: list[str]) -> dict[str, str]:
    """Those of the environment variables ``here`` that the processes of a run get: ``names``, and `HANDED_ON`. Raises
    `ConfigError` where one of ``names`` is not there."""
    if lacking := [name for name in names if name not in here]:
        raise ConfigError(f"--env: {lacking[0]} is not set here; export {lacking[0]}=… first, or leave it out")
    known = {name for name in here if _is_like(name, HANDED_ON) and not _is_like(name, OF_ITS_OWN)}
    return {name: here[name] for name in sorted(known | {*names})}


def _is_like(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def launch(
    folder: Path,
    workdir: Path,
    parts: list[Part],
    env: dict[str, str],
    given: list[str],
    store: str | None,
    address: str | None,
    say: Callable[[str], None],
) -> int:
    """Runs ``parts``, the head first, with the environment variables ``env``, on the cluster at ``address`` (None: the
    one that this machine is part of), until the head ends; returns its exit code. Of ``env`` a machine's own values
    count, but for those ``given`` by name. ``store``: a store's URL with its password, for the head alone. SIGINT and
    SIGTERM, which it is told as they came, have it save a checkpoint first. Raises `ConfigError` where there is no
    cluster, or no room."""
    ray = _ray()
    stopping: list[int] = []
    try:
        ray.init(address=address or "auto", log_to_driver=True, logging_level="warning")
    except ConnectionError as error:
        raise ConfigError(f"--address: no Ray cluster answers at {address or 'this machine'}: {error}") from None
    previous = {number: signal.signal(number, lambda n, _f: stopping.append(n)) for number in (2, 15)}
    try:
        group = _reserve(ray, parts, stopping)
        (name, actor, _, code), *members = _start(
            ray, group, folder, workdir, parts, env, given, {STORE: store} if store else {}
        )
        say(f"placed: {', '.join(part.words for part in parts)}")
        return _watch(ray, (name, actor, code), members, stopping, say)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        ray.shutdown()


def _reserve(ray: Any, parts: list[Part], stopping: list[int]) -> Any:
    """A placement group with a bundle for each task. Raises `ConfigError` where the cluster has no room for it."""
    wanted = [_resources(part) for part in parts for _ in range(part.tasks)]
    group = ray.util.placement_group(wanted, strategy="PACK")
    placed, deadline = group.ready(), time.monotonic() + ROOM_S
    while not ray.wait([placed], timeout=LOOK_S)[0]:
        if stopping:
            raise ConfigError("interrupted while the Ray cluster had no room yet; nothing was started")
        if time.monotonic() > deadline:
            there = {name: ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU")}
            need = {name: sum(bundle.get(name, 0) for bundle in wanted) for name in there}
            raise ConfigError(
                f"rollout.count: the Ray cluster had no room within {ROOM_S:.0f} s: wanted are "
                f"{need['CPU']} CPUs and {need['GPU']} GPUs in {len(wanted)} bundles, it has {there['CPU']:g} and "
                f"{there['GPU']:g} in all; use fewer rollouts, or add machines"
            )
    return group


def _resources(part: Part) -> dict[str, int]:
    return {"CPU": part.cpus} | ({"GPU": part.gpus} if part.gpus else {})


def _start(
    ray: Any,
    group: Any,
    folder: Path,
    workdir: Path,
    parts: list[Part],
    env: dict[str, str],
    given: list[str],
    of_head: dict[str, str],
) -> list[Started]:
    """An actor in each bundle, at work: its name, itself, its command's arguments, and what it will return."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    started, bundle = [], 0
    for part in parts:
        for task in range(part.tasks):
            head = part.kind == "head"
            actor = (
                ray.remote(Process)
                .options(
                    num_cpus=part.cpus,
                    num_gpus=part.gpus,
                    max_restarts=-1,
                    max_task_retries=-1,
                    max_concurrency=2,  # stop() comes while run() is at work
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
                )
                .remote(
                    str(workdir), env | of_head if head else env, (*given, *of_head)
                )  # as a runtime_env Ray's dashboard and logs would show it
            )
            name = part.kind if head else f"{part.kind}-{task}"
            arguments = head_arguments(str(folder)) if head else member_arguments(str(folder), part, str(task))
            started.append((name, actor, arguments, actor.run.remote(arguments)))
            bundle += 1
    return started


def _watch(
    ray: Any,
    head: tuple[str, Any, Any],
    members: list[Started],
    stopping: list[int],
    say: Callable[[str], None],
) -> int:
    """Until the head has ended; then the others, which leave by themselves, or are told to. One that fails is started
    again, where it is."""
    _, actor, code = head
    deadline: float | None = None
    at_work = {name: (member, arguments, result) for name, member, arguments, result in members}
    due: dict[str, float] = {}
    while not ray.wait([code], timeout=LOOK_S)[0]:
        now = time.monotonic()
        if stopping and deadline is None:
            say("told to stop: the run saves a checkpoint …")
            actor.stop.remote(stopping[0])
            deadline = now + LEAVE_S + (TERM_S if stopping[0] == signal.SIGTERM else CHECKPOINT_S)
        if deadline is not None and (now > deadline or len(stopping) > 1):
            say("the run has not ended in time; it is ended")
            return 130
        for name, (member, arguments, result) in list(at_work.items()):
            if name in due:
                if now >= due[name]:
                    del due[name]
                    at_work[name] = (member, arguments, member.run.remote(arguments))
            elif ray.wait([result], timeout=0)[0]:
                ended = _code(ray, result, name, say)
                say(f"{name} has ended with exit code {ended}")
                if ended in (0, 130):
                    del at_work[name]
                else:
                    due[name] = now + AGAIN_S
    for member, _, _ in at_work.values():
        member.stop.remote()
    results = [result for name, (_, _, result) in at_work.items() if name not in due]
    if results:
        ray.wait(results, num_returns=len(results), timeout=LEAVE_S)
    return _code(ray, code, "the run", say)


def _code(ray: Any, result: Any, name: str, say: Callable[[str], None]) -> int:
    """The exit code that an actor has returned; 1 where it could not start its command, or is lost for good."""
    try:
        return int(ray.get(result))
    except ray.exceptions.RayError as error:
        say(f"{name}: {str(error).strip().splitlines()[-1]}")
        return 1


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError(f"penstock launch ray: Ray is not installed; run: {install('ray')}") from None
    return ray
