"""One actor in this process: `penstock serve ACTOR`."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any, Literal

import structlog

from penstock.pipeline.config import Config, ConfigError, PretrainedModel
from penstock.pipeline.resources import gpu_locks
from penstock.pipeline.resources.gpus import gpus_of, visible_gpus
from penstock.pipeline.run import torchrun
from penstock.pipeline.run.folder import summary_of
from penstock.protocols import keys
from penstock.protocols.keys import KeysError
from penstock.protocols.mailbox import AddressError, DeadlineError
from penstock.services.runtime import logs
from penstock.services.runtime.actor import STOP_GRACE_S, ActorContext, on_stop
from penstock.services.runtime.errors import SetupError
from penstock.services.weights.address import interface_of, own_address

log = structlog.get_logger()

ActorName = Literal["broker", "rollout", "reward", "reference", "trainer"]

EXIT_SETUP = 78
"""Exit code of an actor that cannot work with what it was given: starting it again would not help."""


GRACE_S = {"trainer": 120.0, "broker": 160.0}
"""How long an actor of its own may take to leave, where it needs longer: the step in hand and a checkpoint; and whoever
waits for that."""


def model_path(config: Config, folder: Path) -> str:
    """Where the model that training starts from lies. Raises `ConfigError` where a tiny model is not made yet."""
    if isinstance(config.model, PretrainedModel):
        return config.model.path
    path = folder / "model"
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model: there is no model in {path}; make it with: penstock prepare CONFIG --folder {folder}"
        )
    return str(path)


def serve(
    kind: ActorName,
    config: Config,
    place: ActorContext,
    store: str | None = None,
    supervised: bool = False,
    ready_fd: int | None = None,
) -> int:
    """Runs one actor until the run is over; returns the process's exit code. Errors go to log and stderr."""
    rank = torchrun.mine() if kind == "trainer" else 0
    name = f"{place.name}-rank{rank}" if rank else place.name
    file = place.folder / "logs" / f"{name}.jsonl"
    logs.configure(place.run, name, file, config.run.log_level, aloud=not supervised)
    if not supervised and _is_over(place):
        if kind == "broker":  # the one before may have died just before it ended the store
            _end_store(config, store or config.store.url or "")
        return 0
    try:
        if kind == "broker":
            return _serve_broker(config, place, store, supervised, ready_fd)
        if kind == "reference" and not config.with_reference:
            log.info("this run needs no reference: trainer.algorithm.kl.coefficient is 0")
            return 0
        _prepare_environment(kind, config)
        if kind == "trainer" and config.trainer.ranks > 1 and not torchrun.launched():
            return torchrun.launch(config.trainer.ranks, max(30, int(_grace(kind, supervised))))
        if kind == "trainer":
            torchrun.join(config.trainer.ranks)
        actor = _make(kind, config, place)
        if rank:
            grace = _grace(kind, supervised)
            on_stop(lambda reason: log.info("rank 0 decides when to stop", reason=reason), supervised, grace)
            actor.run()
            return 0
        on_stop(actor.actor.stop, supervised, _grace(kind, supervised))
        log.info("stopped", reason=actor.run())
        return 1 if actor.actor.error else 0
    except (SetupError, AddressError, KeysError) as error:
        log.error("cannot work with this setup", error=str(error))
        os.write(2, f"{place.name}: {error}\n".encode())
        return EXIT_SETUP
    except Exception as error:
        if isinstance(error, DeadlineError) and not supervised and _is_over(place):
            return 0  # it ended while we were still on our way to its broker
        log.exception("crashed", error=str(error))
        os.write(2, f"{place.name}: {type(error).__name__}: {error}\n".encode())
        return 1


def _grace(kind: ActorName, supervised: bool) -> float:
    return STOP_GRACE_S if supervised else GRACE_S.get(kind, STOP_GRACE_S)


def _prepare_environment(kind: ActorName, config: Config) -> None:
    """What must stand before torch is imported; a supervisor has set it already."""
    threads = str(threads_of(kind, config))
    for name, value in {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)
    if gpu_locks.asked() and not torchrun.launched():
        gpu_locks.claim_for_this_process(visible_gpus(), gpus_of(config).get(kind, 0))


def _serve_broker(
    config: Config, place: ActorContext, store: str | None, supervised: bool, ready_fd: int | None
) -> int:
    from penstock.services.broker.service import Broker
    from penstock.services.broker.state import BrokerSettings

    url = store or config.store.url
    if url is None:
        raise ConfigError("store.url: a broker that runs alone needs a Redis; give its URL")
    folder = keys_folder(place.folder)
    exposed = not keys.is_loopback(config.broker.bind)
    if exposed:
        keys.make(folder)
        log.info("keys", client=str(folder / "client.json"))
    settings = BrokerSettings(
        run=place.run,
        folder=place.folder,
        seed=config.run.seed,
        steps=config.trainer.steps,
        broker=config.broker,
        gate=config.gate,
        store=config.store,
        replay=config.replay,
        prompts=config.prompts,
        sampling=config.rollout.sampling.training(),
        eval_sampling=config.rollout.sampling.greedy(),
        with_reference=config.with_reference,
        tensorboard=config.run.tensorboard,
        deterministic=config.run.deterministic,
        keys=keys.load_broker(folder / "broker.json") if exposed else None,
        store_key=run_key(place.folder),
    )
    broker = Broker(settings, url)
    on_stop(broker.stop, supervised, _grace("broker", supervised))
    if ready_fd is not None:
        os.write(ready_fd, f"{broker.address}\n".encode())
        os.close(ready_fd)
    address_file(place.folder).write_text(broker.address + "\n")
    error = broker.serve()
    if not supervised:
        from penstock.pipeline.run.finish import conclude

        state = broker.state
        outcome = "complete" if state["phase"] == "done" else "failed" if error else "interrupted"
        conclude(place.folder, config, state, broker.books, state["restarts"], outcome, error)
        log.info("the run is over", outcome=outcome, error=error)
        _end_store(config, url)
    if error:
        raise SetupError(error)
    return 0


def _end_store(config: Config, url: str) -> None:
    """Where it serves this run alone."""
    if config.store.shutdown:
        from penstock.services.broker.store import end_server

        end_server(url)


def _is_over(place: ActorContext) -> bool:
    """The run is complete or has failed, which is said to log and stderr: there is nothing to do for this actor."""
    summary = summary_of(place.folder)
    if summary is None or summary["outcome"] == "interrupted":
        return False
    log.info("the run is over", outcome=summary["outcome"], summary=str(place.folder / "summary.json"))
    what = f"the run in {place.folder} is complete: {summary['steps']} steps"
    if summary["outcome"] == "failed":
        what = f"the run in {place.folder} has failed: {summary['error']}; penstock prepare makes it ready to go on"
    os.write(2, f"{place.name}: {what}\n".encode())
    return True


def address_file(folder: Path) -> Path:
    """Where the broker of the run in ``folder`` says how it is reached."""
    return folder / "broker.address"


def _make(kind: ActorName, config: Config, place: ActorContext) -> Any:
    temperature = config.rollout.sampling.temperature
    dtype, deterministic = config.model.dtype, config.run.deterministic
    if kind == "reward":
        from penstock.services.reward.service import Reward

        return Reward(place, config.reward)
    path = model_path(config, place.folder)
    if kind == "reference":
        from penstock.services.reference.service import Reference

        return Reference(place, config.reference, path, dtype, temperature, deterministic)
    host = own_address(config.weights.host)
    weights = config.weights.model_copy(update={"host": host})
    if not host.startswith("127."):  # NCCL by itself might meet on any of this host's networks
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface_of(host)}")
    if kind == "rollout":
        from penstock.services.rollout.service import Rollout

        return Rollout(place, config.rollout, weights, path, dtype, deterministic)
    from penstock.services.trainer.rank import TrainerSettings
    from penstock.services.trainer.service import Trainer
    from penstock.services.trainer.worker_rank import WorkerRank

    settings = TrainerSettings(
        config.trainer,
        weights,
        path,
        dtype,
        temperature,
        config.gate.max_lag,
        run_key(place.folder),
        place.folder / "checkpoints",
        deterministic,
    )
    return Trainer(place, settings) if torchrun.mine() == 0 else WorkerRank(place, settings)


def keys_folder(folder: Path) -> Path:
    """Where the CURVE keys of the run in ``folder`` are."""
    return folder / "keys"


def run_key(folder: Path) -> str:
    """The run's own key, made once, kept in its folder: by it the store is known to be this run's."""
    path = folder / "run.key"
    if not path.is_file():
        aside = path.with_name(f".run.key-{os.getpid()}")
        aside.write_text(secrets.token_hex(16))
        aside.chmod(0o600)
        aside.rename(path)
    return path.read_text().strip()


def threads_of(kind: ActorName, config: Config) -> int:
    """Compute threads of an actor."""
    sections: dict[str, Any] = {"rollout": config.rollout, "reference": config.reference, "trainer": config.trainer}
    return sections[kind].threads if kind in sections else 1
