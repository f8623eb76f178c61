"""What a run asks of a cluster: the head, which is `penstock run`, and the processes that join it from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.pipeline.config import Config, ConfigError
from penstock.pipeline.resources.gpus import gpus_of_programs
from penstock.pipeline.resources.host import PROCESS_GIB, SPARE, HostNeeds, host_needs, processes_of
from penstock.pipeline.resources.placement import joining_guests, seated
from penstock.pipeline.resources.store_size import store_gib
from penstock.services.reward.config import ASKING, ENVIRONMENT
from penstock.services.rollout.config import VllmEngineConfig
from penstock.services.runtime import registry
from penstock.services.runtime.registry import ActorSpec

TAKEOVER_S = 300
"""A head that takes over waits so long for the one before it to be gone: until its node's lock is free, or its last
checkpoint is written."""
PATIENCE_S = 3600
"""Those that join wait so long for a run that waits for a machine."""
HEAD_CPUS = 1
"""Beside those of the processes that compute: supervisor, broker, Redis, rewards that wait."""
REWARD_CPUS = 4
"""For rewards that compute where `reward.workers` is null: it is as many as there are cores."""
COMPUTE = {"code_tests", "math_verify", "reasoning_gym"}
"""Rewards that take seconds of a core; who knows what a user's own takes."""
VLLM_CPUS = 2
"""Of a vLLM engine beside one for each of its GPUs: its API and its core, which is a busy loop (vLLM's own advice)."""
GPU_CPUS = 2
"""Of another process that works a GPU: one that gives it work, and one for its gradients, copies and weights."""


@dataclass(frozen=True)
class Part:
    """Something that a cluster places on one machine."""

    kind: str
    """``head``, or what joins: ``rollout``, say."""
    tasks: int
    """So many of it, each on its own."""
    each: int
    """Processes in each task."""
    gpus: int
    """Of each task."""
    cpus: int
    """Of each task."""
    processes: int
    """That compute, in each task."""
    fixed: bool = False
    """There can be no more tasks of it."""
    memory_gib: int | None = None
    """Of the machine's, for each task; None: the model's sizes are not known."""

    @property
    def words(self) -> str:
        """For people."""
        what = "the run" if self.kind == "head" else f"{self.tasks} x {self.each} {self.kind}"
        gpus = f", {self.gpus} GPUs" if self.gpus else ""
        memory = f", {self.memory_gib} GiB for its models" if self.memory_gib else ""
        return f"{what}: {self.cpus} CPUs{gpus}{memory}{' each' * (self.tasks > 1)}"


def parts_of(config: Config, with_gpus: bool, each: int = 1) -> list[Part]:
    """The head first; ``each``: processes of one kind in a task, where there are several. Raises `ConfigError` where
    these would be more than the config says."""
    head = [(spec, len(spec.names(config))) for spec in registry.started_here(config)]
    gpus = (sum(count * spec.gpus(config) for spec, count in head) + gpus_of_programs(config)) * with_gpus
    cpus = HEAD_CPUS + sum(count * _cpus(spec, config, with_gpus) for spec, count in head)
    found = [Part("head", 1, 1, gpus, cpus, sum(count * processes_of(spec, config) for spec, count in head))]
    specs, guests = registry.actors(config), joining_guests(config)
    for kind in dict.fromkeys(kind for kind in config.run.elsewhere if kind not in guests):
        spec, count = specs[kind], len(specs[kind].names(config))
        if not count:
            continue
        size, nodes = min(each, count), spec.nodes(config)
        if count % size:
            key = f"scorers.{kind}.count" if kind in config.scorers else f"{kind}.count"
            fit = ", ".join(str(number) for number in range(1, count + 1) if not count % number)
            raise ConfigError(f"--each: {each} does not divide {key}={count}; take one of {fit}, or another {key}")
        tasks = count // size * nodes
        gpus, cpus = size * spec.gpus(config) * with_gpus // nodes, size * _cpus(spec, config, with_gpus) // nodes
        processes = size * processes_of(spec, config) // nodes
        if kind == "trainer":
            cpus += sum(count * _cpus(specs[guest], config, with_gpus) for guest, count in guests.items())
            processes += sum(count * processes_of(specs[guest], config) for guest, count in guests.items())
            wanted = {f"{guest}-{i}": specs[guest].gpus(config) for guest, n in guests.items() for i in range(n)}
            seated(config, [str(gpu) for gpu in range(gpus)], wanted)  # now, not when a machine is there
        found.append(Part(kind, tasks, size, gpus, cpus, processes, fixed=spec.single))
    needs = host_needs(config)
    return [replace(part, memory_gib=_memory_gib(config, part, needs)) for part in found] if needs else found


def actors_in(config: Config, part: Part) -> dict[str, int]:
    """How many actors of each kind a task of ``part`` has."""
    if part.kind == "head":
        return {spec.kind: len(spec.names(config)) for spec in registry.started_here(config)}
    return {part.kind: part.each} | (joining_guests(config) if part.kind == "trainer" else {})


def head_arguments(folder: str) -> list[str]:
    """Of ``penstock``, for the run itself."""
    return ["run", "--resume", folder, "--wait", str(TAKEOVER_S)]


def member_arguments(folder: str, part: Part, name: str) -> list[str]:
    """Of ``penstock``, for what joins as ``name``."""
    return ["join", folder, part.kind, "--count", str(part.each), "--patience", str(PATIENCE_S), "--name", name]


def _cpus(spec: ActorSpec, config: Config, with_gpus: bool) -> int:
    """Of one actor, all its ranks together."""
    gpus, threads = spec.gpus(config) * with_gpus, spec.threads(config) * spec.ranks(config)
    if spec.kind == "rollout" and isinstance(config.rollout.engine, VllmEngineConfig):
        return max(threads, VLLM_CPUS + max(1, gpus))
    if spec.kind == "reward":
        return threads + _reward_cpus(config)
    return max(threads, GPU_CPUS * gpus)


def _reward_cpus(config: Config) -> int:
    """Of a reward process's workers, however many functions these are for: what waits for one seldom waits for two."""
    functions = {each.function for each in config.reward.functions} - ASKING - {ENVIRONMENT}  # these wait alone
    if config.reward.workers:
        return config.reward.workers * bool(functions)
    computes = any(function in COMPUTE or ":" in function for function in functions)
    return -(-REWARD_CPUS // config.reward.count) * computes


def _memory_gib(config: Config, part: Part, needs: HostNeeds) -> int:
    actors, gib = actors_in(config, part), PROCESS_GIB * max(1, part.processes)
    if "trainer" in actors:
        gib += max(needs.trainer_nodes(config, actors, config.trainer.ranks // config.trainer.nodes))
    else:
        gib += sum(count * needs.beside(kind, config) for kind, count in actors.items())
    if part.kind == "head" and config.store.url is None:
        gib += store_gib(config) / 2  # answers are half as long as they may be, on average, or shorter
    return round(SPARE * gib + 0.5)
