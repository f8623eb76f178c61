"""The command ``penstock``."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console

from pipeline.config import Config, ConfigError, TinyModel, dump, load
from protocols.keys import KeysError
from services.section import SetupError

app = typer.Typer(
    name="penstock",
    help="Asynchronous reinforcement learning for language models.\n\nStart with: penstock run configs/quickstart.yaml",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Benchmarks, each beside a peer or a physical limit.", no_args_is_help=True)
app.add_typer(bench, name="bench")

FILE = Annotated[Path, typer.Argument(help="The run's config, e.g. configs/quickstart.yaml.", show_default=False)]
OVERRIDES = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads this form
    typer.Argument(help="Overrides, e.g. gate.max_lag=0 trainer.optimizer.lr=1e-5.", show_default=False),
]


def main() -> None:
    """Entry point: errors a user can mend are one clear message and exit code 2."""
    sys.path.append(str(Path.cwd()))  # for functions of the user's own, named module:function
    try:
        app()
    except (SetupError, KeysError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)


@app.command()
def run(
    file: FILE,
    overrides: OVERRIDES = None,
    dry_run: Annotated[bool, typer.Option(help="Print the resolved config and stop.")] = False,
    resume: Annotated[
        Optional[Path], typer.Option(help="Go on with the run in this folder.", show_default=False)  # noqa: UP045
    ] = None,
) -> None:
    """Run everything that FILE describes on this machine: Redis, broker, rollouts, reward, reference, trainer.

    Watches the processes, starts again what dies, and leaves metrics.jsonl, summary.json, report.html, logs/ and
    checkpoints/ in the run's folder. Ctrl-C drains, saves a checkpoint and stops; --resume goes on from there, with the
    same model and data; steps, bounds and rates may be others.
    """
    config = load(file, overrides)
    if dry_run:
        typer.echo(dump(config), nl=False)
        return
    from pipeline.launch import RunError, new_folder, resumed_folder
    from pipeline.launch import run as launch

    console = Console()
    folder = resumed_folder(config, resume) if resume else new_folder(config, file)
    console.print(f"run folder: {folder}", highlight=False)
    try:
        summary = launch(config, folder, console)
    except RunError as error:
        typer.echo(f"error: {error}\nlogs: {folder / 'logs'}", err=True)
        raise typer.Exit(1) from None
    _print_summary(console, summary, folder)
    raise typer.Exit(0 if summary["outcome"] == "complete" else 130)


@app.command()
def serve(
    actor: Annotated[str, typer.Argument(help="broker, rollout, reward, reference or trainer.")],
    config: Annotated[Path, typer.Option(help="The run's config.")],
    overrides: OVERRIDES = None,
    broker: Annotated[
        Optional[str], typer.Option(help="The broker's address, e.g. tcp://127.0.0.1:5555.", show_default=False)  # noqa: UP045
    ] = None,
    folder: Annotated[Path, typer.Option(help="The run's folder: logs, checkpoints, a tiny model.")] = Path(
        "runs/served"
    ),
    name: Annotated[
        Optional[str], typer.Option(help="The actor's name, unique in the run.", show_default=False)  # noqa: UP045
    ] = None,
    keys: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="The run's keys/client.json, for a broker on another machine.", show_default=False),
    ] = None,
    supervised: Annotated[bool, typer.Option(hidden=True)] = False,
    ready_fd: Annotated[Optional[int], typer.Option(hidden=True)] = None,  # noqa: UP045
) -> None:
    """Run one actor alone, as a container or another host does.

    The broker needs a Redis: store.url in the config, or the environment variable PENSTOCK_STORE. The others need
    --broker. Each exits 0 when the run is over. A broker whose broker.bind is not on the loopback makes keys in its
    run's folder; the others need a copy of keys/client.json.
    """
    from pipeline.serve import keys_folder, threads_of
    from pipeline.serve import serve as serve_actor
    from protocols.keys import load_client
    from services.actor import Place

    kinds = ("broker", "rollout", "reward", "reference", "trainer")
    if actor not in kinds:
        raise ConfigError(f"ACTOR: {actor!r} is not one of {', '.join(kinds)}")
    resolved = load(config, overrides)
    if actor != "broker" and broker is None:
        raise ConfigError(f"{actor}: give the broker's address with --broker, e.g. tcp://127.0.0.1:5555")
    folder.mkdir(parents=True, exist_ok=True)
    client = keys or keys_folder(folder) / "client.json"
    mine = load_client(client) if actor != "broker" and (keys or client.is_file()) else None
    kind: Any = actor
    place = Place(
        name or f"{actor}-{socket.gethostname()}-{os.getpid()}",
        folder.name,
        folder,
        broker or "",
        threads_of(kind, resolved),
        mine,
    )
    store = os.environ.pop("PENSTOCK_STORE", None)
    raise typer.Exit(serve_actor(kind, resolved, place, store, supervised, ready_fd))


@app.command()
def prepare(
    file: FILE,
    overrides: OVERRIDES = None,
    folder: Annotated[Path, typer.Option(help="The run's folder.")] = Path("runs/served"),
) -> None:
    """Make the tiny model of a config, with its warm start, in FOLDER/model. `penstock run` does this by itself."""
    config = load(file, overrides)
    if not isinstance(config.model, TinyModel):
        typer.echo("nothing to prepare: model.type is pretrained")
        return
    make_tiny(config, folder)


def make_tiny(config: Config, folder: Path) -> None:
    """Makes the config's tiny model in ``folder``/model, with a progress bar."""
    from rich.progress import Progress

    from pipeline.recipes.tiny import build
    from services.broker.data import open_source

    assert isinstance(config.model, TinyModel)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("warm start", total=config.model.warm_start.steps)

        def advance(step: int, _steps: int, loss: float) -> None:
            progress.update(task, completed=step, description=f"warm start, loss {loss:.3f}")

        source = open_source(config.prompts.train)
        build(config.model, source, folder / "model", config.run.seed, advance)


RUN = Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)]


@app.command()
def ledger(run: RUN, as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line.")] = False) -> None:
    """Print which groups each step of a run trained on, and the digest of the version that it yielded."""
    from pipeline.replay import show_ledger

    show_ledger(Console(), run, as_json)


@app.command()
def replay(
    run: RUN,
    step: Annotated[Optional[int], typer.Option(help="Only this step.", show_default=False)] = None,  # noqa: UP045
) -> None:
    """Redo a run's steps from its archive, offline, and compare each version's digest with the recorded one.

    Needs replay.archive: all. Exit code 0 where all digests agree, which run.deterministic promises.
    """
    from pipeline.replay import replay as run_replay

    raise typer.Exit(0 if run_replay(Console(), run, step) else 1)


@app.command()
def doctor() -> None:
    """Say what this machine has, and what it lacks."""
    from pipeline.doctor import examine

    raise typer.Exit(0 if examine(Console()) else 1)


@bench.command("generate")
def bench_generate(
    model: Annotated[
        str | None,
        typer.Option(help="A model folder or hub name; by default the quickstart's size.", show_default=False),
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests, each with a prompt and an answer of random length.")] = 512,
    batch: Annotated[int, typer.Option(help="Sequences decoded at once, by both.")] = 128,
    threads: Annotated[int, typer.Option(help="Compute threads, for both.")] = 2,
    repeats: Annotated[int, typer.Option(help="Runs of each, in turns; the median counts.")] = 3,
    seed: int = 0,
) -> None:
    """Tokens/s of the torch engine beside plain model.generate, on a mix of prompt and answer lengths."""
    from pipeline.bench.generate import bench as run_bench

    run_bench(Console(), model, requests, batch, threads, repeats, seed)


@bench.command("peers")
def bench_peers(
    peer: Annotated[
        str, typer.Option(help="The other trainer: trl (installed into this environment on demand).")
    ] = "trl",
    config: Annotated[Path, typer.Option(help="The task.")] = Path("configs/quickstart.yaml"),
    folder: Annotated[Path, typer.Option(help="Where both runs go.")] = Path("runs/bench-peers"),
    steps: Annotated[int, typer.Option(help="Training steps of each run.")] = 120,
    seeds: Annotated[int, typer.Option(help="Pairs of runs.")] = 3,
    threads: Annotated[int, typer.Option(help="Compute threads of the other trainer.")] = 2,
) -> None:
    """Wall-clock to a 5-step mean reward above 0.9, and tokens/s, beside another trainer on the same task."""
    from pipeline.bench.peers import bench_trl, check

    if peer != "trl":
        raise ConfigError(f"--peer: {peer!r} is not one of: trl")
    check(config)
    bench_trl(Console(), config, folder, steps, list(range(seeds)), threads)


@bench.command("broker")
def bench_broker(
    rollouts: Annotated[str, typer.Option(help="Simulated rollouts, comma-separated.")] = "1,16,256",
    groups: Annotated[int, typer.Option(help="Groups in each measurement.")] = 3000,
    tokens: Annotated[int, typer.Option(help="Tokens of each of a group's 8 trajectories.")] = 256,
) -> None:
    """Groups/s and MB/s from lease to durable, beside raw ZeroMQ and raw Redis in the same run."""
    from pipeline.bench.broker import bench as run_bench

    run_bench(Console(), [int(count) for count in rollouts.split(",")], groups, tokens)


@bench.command("weights")
def bench_weights(
    sizes: Annotated[str, typer.Option(help="Million parameters: 10, 50, 130, 500, 1000.")] = "10,130,1000",
    receivers: Annotated[str, typer.Option(help="Receivers, each a process.")] = "1,2,4",
    transports: Annotated[str, typer.Option(help="shm and gloo.")] = "shm,gloo",
    parts: Annotated[
        str, typer.Option(help="transfer: GB/s; pause: what generation feels; elastic: joins and deaths; sparse.")
    ] = "transfer,pause,elastic,sparse",
    threads: Annotated[int, typer.Option(help="Compute threads of the trainer, and of memcpy.")] = 1,
) -> None:
    """GB/s of the weight channel beside memcpy (shm) and a bare broadcast (gloo), and what rollouts feel of it."""
    from pipeline.bench.weights import SHAPES
    from pipeline.bench.weights import bench as run_bench

    asked = [int(size) for size in sizes.split(",")]
    if unknown := [size for size in asked if size not in SHAPES]:
        raise ConfigError(f"--sizes: {unknown[0]} is not one of {', '.join(map(str, SHAPES))}")
    counts = [int(count) for count in receivers.split(",")]
    run_bench(Console(), asked, counts, transports.split(","), threads, set(parts.split(",")))


@bench.command("soak")
def bench_soak(
    steps: Annotated[int, typer.Option(help="Tiny training steps.")] = 5000,
    every: Annotated[int, typer.Option(help="Steps between two looks at the memory.")] = 50,
    config: Annotated[Path, typer.Option(help="The config that is made tiny.")] = Path("configs/quickstart.yaml"),
    folder: Annotated[Path, typer.Option(help="Where run, soak.csv and soak.svg go.")] = Path("runs/bench-soak"),
) -> None:
    """Thousands of tiny steps: memory of every process and of Redis, and its growth per 1,000 steps.

    Exit code 0 where all of it is below 1 % per 1,000 steps, after the first fifth.
    """
    from pipeline.bench.soak import bench as run_bench

    raise typer.Exit(0 if run_bench(Console(), config, folder, steps, every) else 1)


def _print_summary(console: Console, summary: dict[str, Any], folder: Path) -> None:
    keys: tuple[str, ...] = (
        "steps",
        "reward_first",
        "reward_last",
        "eval_before",
        "eval_after",
        "lag_max_seen",
        "groups_trained",
    )
    keys += ("groups_lost", "groups_trained_twice", "train_s", "restarts")
    console.print(json.dumps({key: summary[key] for key in keys}, indent=2), highlight=False)
    report = folder / "report.html"
    if report.is_file():
        console.print(f"report: {report}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
