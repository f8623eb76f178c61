"""A run's folder, looked at and ready, before a cluster is asked for machines."""

from __future__ import annotations

from ipaddress import IPv4Network
from pathlib import Path

from rich.console import Console

from penstock.pipeline.config import Config, ConfigError, load
from penstock.pipeline.config.origin import Origin
from penstock.pipeline.preflight.look import look
from penstock.pipeline.preflight.reached import unreached
from penstock.pipeline.preflight.steps import counted
from penstock.pipeline.resources.placement import guests_beside_rollouts
from penstock.pipeline.run.folder import new_folder, open_folder
from penstock.pipeline.run.lock import is_at_work
from penstock.pipeline.run.resume import resumed
from penstock.protocols.keys import is_loopback
from penstock.services.runtime import registry
from penstock.services.runtime.address import own_network


def resolve(
    console: Console, file: Path | None, overrides: list[str], resume: Path | None, network: str | None
) -> tuple[Config, Origin, Path]:
    """The config of a run that is spread over machines, its origin, and its folder: with rollouts elsewhere, and
    learners of several machines, unless ``run.elsewhere`` says otherwise, and where `on_network` says. Raises
    `ConfigError`."""
    if (file is None) == (resume is None):
        raise ConfigError("give a config, e.g. configs/quickstart.yaml; or, to go on, a run's folder with --resume")
    if resume:
        plain = resumed(resume, None, overrides)[0]
        config, origin, _ = resumed(resume, None, [*overrides, *spread(plain), *on_network(console, plain, network)])
        return config, origin, resume.resolve()
    assert file
    plain = load(file, overrides)
    more = [*overrides, *spread(plain), *on_network(console, plain, network)]
    config, line = counted(load(file, more))
    if line:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return config, Origin(str(file.resolve()), tuple(more)), new_folder(config, file).resolve()


def on_network(console: Console, plain: Config, given: str | None) -> list[str]:
    """Overrides that put a run's broker and its weights on the network ``given``; None: on this machine's, whichever
    of them ``plain`` has on the loopback. Raises `ConfigError`."""
    binds = bool(given) or is_loopback(plain.broker.bind)
    sends = bool(given) or plain.weights.host.startswith("127.")
    if not (binds or sends):
        return []
    network = cluster_network(console, given)
    return [f"broker.bind=tcp://{network}:0"] * binds + [f"weights.host={network}"] * sends


def spread(plain: Config) -> list[str]:
    """Overrides that spread a run over machines, where ``plain`` does not say how."""
    if plain.run.placement == "auto":
        raise ConfigError(
            "run.placement: auto lays out the GPUs of one machine; for a cluster take run.placement=as_given, and what "
            "`penstock plan FILE --gpus …` says"
        )
    spread_too = [kind for kind, spec in registry.actors(plain).items() if spec.nodes(plain) > 1]
    if plain.run.colocated:  # guests come with the trainer's machines
        spread_too = ["trainer", *guests_beside_rollouts(plain)]
    return [] if plain.run.elsewhere else [f"run.elsewhere=[{','.join(['rollout', *spread_too])}]"]


def cluster_network(console: Console, given: str | None) -> str:
    """The network that a cluster's machines share. Raises `ConfigError` where it is none, or this machine has none."""
    found = given or own_network()
    if not found or (not given and found.endswith("/32")):
        raise ConfigError("--network: this machine does not say which it is on; give the cluster's, e.g. 10.1.0.0/16")
    try:
        IPv4Network(found)
    except ValueError as error:
        raise ConfigError(f"--network: {error}; e.g. 10.1.0.0/16") from None
    if not given:
        console.print(f"network: {found} (this machine's; --network gives another)", highlight=False)
    return found


def make_ready(console: Console, config: Config, origin: Origin, folder: Path) -> None:
    """Looks at everything, and makes the folder. Raises `ConfigError`."""
    if is_at_work(folder):
        raise ConfigError(f"the run in {folder} is going on; watch it with: penstock top {folder}")
    look_at(console, config, folder)
    open_folder(config, folder, origin)


def look_at(console: Console, config: Config, folder: Path) -> None:
    """Looks at all that the config names; what this machine lacks, the cluster's may have, and programs are on the
    head's alone. Raises `ConfigError`."""
    with console.status("looking at data, model and functions …"):
        report = look(config, folder)
    report.problems += unreached(config)
    report.check(elsewhere=True)
    for note in report.remarks:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
