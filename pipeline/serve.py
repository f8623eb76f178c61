"""One actor in this process: `penstock serve ACTOR`."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any, Literal

import structlog

from pipeline import ranks
from pipeline.config import Config, ConfigError, PretrainedModel
from protocols import keys
from protocols.keys import KeysError
from protocols.mailbox import AddressError
from services import logs
from services.actor import Place, on_stop
from services.section import SetupError

log = structlog.get_logger()

ActorName = Literal["broker", "rollout", "reward", "reference", "trainer"]

EXIT_SETUP = 78
"""Exit code of an actor that cannot work with what it was given: starting it again would not help."""


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
    place: Place,
    store: str | None = None,
    supervised: bool = False,
    ready_fd: int | None = None,
) -> int:
    """Runs one actor until the run is over; returns the process's exit code. Errors go to log and stderr."""
    rank = ranks.mine() if kind == "trainer" else 0
    name = f"{place.name}-rank{rank}" if rank else place.name
    logs.configure(place.run, name, place.folder / "logs" / f"{name}.jsonl", config.run.log_level)
    try:
        if kind == "broker":
            return _serve_broker(config, place, store, supervised, ready_fd)
        if kind == "trainer" and config.trainer.ranks > 1 and not ranks.launched():
            return ranks.launch(config.trainer.ranks)
        if kind == "trainer":
            ranks.join(config.trainer.ranks)
        actor = _make(kind, config, place)
        if rank:
            on_stop(lambda reason: log.info("rank 0 decides when to stop", reason=reason), supervised)
            actor.run()
            return 0
        on_stop(actor.actor.stop, supervised)
        log.info("stopped", reason=actor.run())
        return 1 if actor.actor.error else 0
    except (SetupError, AddressError, KeysError) as error:
        log.error("cannot work with this setup", error=str(error))
        os.write(2, f"{place.name}: {error}\n".encode())
        return EXIT_SETUP
    except Exception as error:
        log.exception("crashed", error=str(error))
        os.write(2, f"{place.name}: {type(error).__name__}: {error}\n".encode())
        return 1


def _serve_broker(config: Config, place: Place, store: str | None, supervised: bool, ready_fd: int | None) -> int:
    from services.broker.desk import BrokerSettings
    from services.broker.service import Broker

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
    on_stop(broker.stop, supervised)
    if ready_fd is not None:
        os.write(ready_fd, f"{broker.address}\n".encode())
        os.close(ready_fd)
    error = broker.serve()
    if error:
        raise SetupError(error)
    return 0


def _make(kind: ActorName, config: Config, place: Place) -> Any:
    temperature = config.rollout.sampling.temperature
    dtype, deterministic = config.model.dtype, config.run.deterministic
    if kind == "reward":
        from services.reward.service import Reward

        return Reward(place, config.reward)
    path = model_path(config, place.folder)
    if kind == "rollout":
        from services.rollout.service import Rollout

        return Rollout(place, config.rollout, config.weights, path, dtype, deterministic)
    if kind == "reference":
        from services.reference.service import Reference

        return Reference(place, config.reference, path, dtype, temperature, deterministic)
    from services.trainer.follower import Follower
    from services.trainer.rank import TrainerSettings
    from services.trainer.service import Trainer

    settings = TrainerSettings(
        config.trainer,
        config.weights,
        path,
        dtype,
        temperature,
        config.gate.max_lag,
        run_key(place.folder),
        place.folder / "checkpoints",
        deterministic,
    )
    return Trainer(place, settings) if ranks.mine() == 0 else Follower(place, settings)


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
