"""One actor in this process: `penstock serve ACTOR`."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import yaml

from penstock.pipeline.config import Config, ConfigError, dump
from penstock.pipeline.resources import gpu_locks
from penstock.pipeline.resources.placement import is_guest, sharers
from penstock.pipeline.run import crashes, torchrun
from penstock.pipeline.run.folder import address_file, keys_folder, model_path, run_key
from penstock.pipeline.run.last_words import end_run, last_words
from penstock.protocols import keys
from penstock.protocols.keys import KeysError
from penstock.protocols.mailbox import AddressError, DeadlineError
from penstock.protocols.messages import LedgerReply
from penstock.protocols.run_lock import read_summary
from penstock.protocols.wire import ProtocolError
from penstock.services.runtime import logs, registry
from penstock.services.runtime.actor import ActorContext, on_stop
from penstock.services.runtime.address import interface_of, own_address, own_endpoint
from penstock.services.runtime.errors import EXIT_SETUP, SetupError
from penstock.services.runtime.files import write_whole
from penstock.services.runtime.gpus import ALLOCATOR, EXACT, GROWS, visible_gpus
from penstock.services.runtime.processes import raise_file_limit
from penstock.services.runtime.registry import ActorSpec

if TYPE_CHECKING:
    from penstock.services.broker.state import BrokerSettings

log = structlog.get_logger()


def serve(
    kind: str,
    config: Config,
    context: ActorContext,
    store: str | None = None,
    supervised: bool = False,
    ready_fd: int | None = None,
) -> int:
    """Runs one actor until the run is over; returns the process's exit code. Errors go to log and stderr."""
    spec = registry.actors(config)[kind]
    rank = torchrun.mine() if spec.learns else 0
    name = _log_name(spec, config, context.name, rank)
    file = context.folder / "logs" / f"{name}.jsonl"
    logs.configure(context.run, name, file, config.run.log_level, aloud=not supervised)
    if not supervised and _is_over(context):
        if kind == "broker":  # the one before may have died just before it ended the store
            _end_store(config, store or config.store.url or "")
        return 0
    place = crashes.Place()
    raise_file_limit()
    try:
        if kind == "broker":
            return _serve_broker(config, context, store, supervised, ready_fd, place)
        if not spec.count(config):
            log.info(f"this run needs no {kind}: {spec.unneeded}")
            return 0
        return _serve_member(spec, config, context, rank, supervised, place)
    except (SetupError, AddressError, KeysError, ProtocolError) as error:
        log.error("cannot work with this setup", error=str(error))
        os.write(2, f"{context.name}: {error}\n".encode())
        if isinstance(error, SetupError):
            end_run(spec, context, str(error), supervised)
        return EXIT_SETUP
    except Exception as error:
        if isinstance(error, DeadlineError) and not supervised and _is_over(context):
            return 0  # it ended while we were still on our way to its broker
        log.exception("crashed", error=str(error))
        code, said = last_words(error, context, name, place.step, spec.ranks(config) > 1)
        if code == EXIT_SETUP:
            end_run(spec, context, said, supervised)
        return code


def _log_name(spec: ActorSpec, config: Config, name: str, rank: int) -> str:
    """What this process's log is called: of several machines each has its own."""
    if rank:
        return f"{name}-rank{rank}"
    return name if spec.nodes(config) == 1 or torchrun.launched() else f"{name}-on-{socket.gethostname()}"


def _serve_member(
    spec: ActorSpec, config: Config, context: ActorContext, rank: int, supervised: bool, place: crashes.Place
) -> int:
    _prepare_environment(spec, config)
    if spec.learns:
        ranks = spec.ranks(config)
        if ranks > 1 and not torchrun.launched():
            return _launch_ranks(spec, config, context.folder)
        torchrun.join(spec.kind, ranks)
    context = replace(context, run_key=run_key(context.folder))
    if spec.kind != "reward":
        context = replace(context, model_path=model_path(config, context.folder))
    if spec.kind in ("rollout", "trainer"):
        config = _on_weight_network(config)
    actor = spec.create(context, config)
    try:
        return _run_actor(actor, rank, supervised, spec.grace_s)
    finally:
        place.step = actor.version if rank else actor.actor.version


def _launch_ranks(spec: ActorSpec, config: Config, folder: Path) -> int:
    """This machine's."""
    nodes, grace_s = spec.nodes(config), max(30, int(spec.grace_s))
    host = _on_weight_network(config).weights.host if nodes > 1 or spec.kind == "trainer" else ""
    if nodes == 1:
        return torchrun.launch(spec.ranks(config), grace_s)
    return torchrun.launch_spread(spec.kind, nodes, spec.ranks(config) // nodes, grace_s, folder, host)


def _run_actor(actor: Any, rank: int, supervised: bool, grace: float) -> int:
    if rank:
        on_stop(lambda reason: log.info("rank 0 decides when to stop", reason=reason), supervised, grace)
        actor.run()
        return 0
    on_stop(actor.actor.stop, supervised, grace)
    log.info("stopped", reason=actor.run())
    return 1 if actor.actor.error else 0


def _on_weight_network(config: Config) -> Config:
    """With this host's own address where the config names a network."""
    host = own_address(config.weights.host)
    if not host.startswith("127."):  # NCCL by itself might meet on any of this host's networks
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface_of(host)}")
    return config.model_copy(update={"weights": config.weights.model_copy(update={"host": host})})


def _prepare_environment(spec: ActorSpec, config: Config) -> None:
    """What must stand before torch is imported; a supervisor has set it already."""
    for name, value in environment(spec, config).items():
        os.environ.setdefault(name, value)
    if gpu_locks.asked() and not torchrun.launched():
        shared = config.run.colocated and spec.kind in sharers(config)  # the trainer's are theirs too
        kind = "-guest" if is_guest(config, spec.kind) else "-critic"
        gpu_locks.claim_for_this_process(visible_gpus(), spec.gpus(config) // spec.nodes(config), kind * shared)


def environment(spec: ActorSpec, config: Config) -> dict[str, str]:
    """Environment variables of an actor's process."""
    threads = str(spec.threads(config))
    found = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    found["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as the driver numbers GPUs, and so what we give out
    told = not os.environ.keys().isdisjoint(ALLOCATOR)  # what the user has said stays
    if (spec.learns or spec.kind == "reference") and not told:
        found[ALLOCATOR[0]] = GROWS
    if config.run.deterministic and visible_gpus():
        found |= EXACT | {"VLLM_BATCH_INVARIANT": "1"}
    return found


def _serve_broker(
    config: Config,
    context: ActorContext,
    store: str | None,
    supervised: bool,
    ready_fd: int | None,
    place: crashes.Place,
) -> int:
    from penstock.services.broker.service import Broker

    url = store or config.store.url
    if url is None:
        raise ConfigError("store.url: a broker that runs alone needs a Redis; give its URL")
    broker = Broker(_broker_settings(config, context), url, supervised)

    def leave(reason: str) -> None:
        """Told alone, a supervised one is started again, as any other process is; else the run ends with it."""
        if supervised and reason in signal.Signals.__members__:
            broker.leave()
        else:
            broker.stop(reason)

    on_stop(leave, supervised, registry.actors(config)["broker"].grace_s)
    if ready_fd is not None:
        os.write(ready_fd, f"{broker.address}\n".encode())
        os.close(ready_fd)
    write_whole(address_file(context.folder), broker.address + "\n")
    try:
        error = broker.serve()
    finally:
        place.step = broker.ledger_state.steps
    if not supervised:
        _conclude(context, broker.state, broker.ledger_state, error)
        _end_store(config, url)
    if error:
        raise SetupError(error)
    return 0


def _broker_settings(config: Config, context: ActorContext) -> BrokerSettings:
    """With keys where the broker listens beyond the loopback, or has done so: everybody else takes those in the run's
    folder."""
    from penstock.services.broker.state import BrokerSettings

    folder = keys_folder(context.folder)
    bound = config.broker.model_copy(update={"bind": own_endpoint(config.broker.bind, "broker.bind")})
    client = folder / "client.json"
    if not keys.is_loopback(bound.bind):
        keys.make(folder)
        log.info("keys", client=str(client))
    return BrokerSettings(
        run=context.run,
        folder=context.folder,
        seed=config.run.seed,
        steps=config.trainer.counted_steps,
        broker=bound,
        gate=config.gate,
        store=config.store,
        replay=config.replay,
        prompts=config.prompts,
        sampling=config.sampling,
        eval_sampling=config.rollout.sampling.greedy(),
        columns=config.columns,
        learners=registry.learners(config),
        agents=config.gateway.count > 0,
        without_engine=config.rollout.without_engine,
        trackers=config.run.trackers,
        tracker_samples=config.run.tracker_samples,
        prometheus=config.run.prometheus,
        traces=config.run.traces,
        wanted={spec.kind: len(spec.names(config)) for spec in registry.actors(config).values()},
        project=config.run.project,
        described=yaml.safe_load(dump(config)),
        deterministic=config.run.deterministic,
        keys=keys.load_broker(folder / "broker.json") if client.is_file() else None,
        store_key=run_key(context.folder),
    )


def _conclude(context: ActorContext, state: dict[str, Any], ledger: LedgerReply, error: str | None) -> None:
    """Says what the run came to, where no supervisor does."""
    from penstock.pipeline.run.finish import conclude

    outcome = "complete" if state["phase"] == "done" else "failed" if error else "interrupted"
    summary = conclude(context.folder, state, ledger, state["restarts"], outcome, error)
    log.info("the run is over", outcome=outcome, error=error)
    for sentence in summary["look_at_this"]:
        os.write(2, f"{context.name}: look at this: {sentence}\n".encode())


def _end_store(config: Config, url: str) -> None:
    """Where it serves this run alone."""
    if config.store.shutdown:
        from penstock.services.broker.store import end_server

        end_server(url)


def _is_over(context: ActorContext) -> bool:
    """The run is complete or has failed, which is said to log and stderr: there is nothing to do for this actor."""
    summary = read_summary(context.folder)
    if summary is None or summary["outcome"] == "interrupted":
        return False
    log.info("the run is over", outcome=summary["outcome"], summary=str(context.folder / "summary.json"))
    what = f"the run in {context.folder} is complete: {summary['steps']} steps"
    if summary["outcome"] == "failed":
        what = f"the run in {context.folder} has failed: {summary['error']}; penstock prepare makes it ready to go on"
    os.write(2, f"{context.name}: {what}\n".encode())
    return True
