"""The command ``penstock``."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from penstock.pipeline.bench.cli import bench
from penstock.pipeline.config import ConfigError, load
from penstock.pipeline.launch.cli import launch
from penstock.pipeline.report.console import OwnConsole, RunConsole
from penstock.pipeline.run.crashes import FULL
from penstock.pipeline.run.lock import HeldError
from penstock.pipeline.tools.agents_cli import agents
from penstock.pipeline.tools.arguments import FILE, OVERRIDES
from penstock.pipeline.tools.doctor_cli import doctor
from penstock.pipeline.tools.join_cli import join
from penstock.pipeline.tools.keys_cli import app as keys
from penstock.pipeline.tools.merge import merge
from penstock.pipeline.tools.page_cli import page
from penstock.pipeline.tools.plan_cli import compose_env, plan_run
from penstock.pipeline.tools.play_cli import play
from penstock.pipeline.tools.prepare_cli import prepare
from penstock.pipeline.tools.rollback import rollback
from penstock.pipeline.tools.rollouts_cli import rollouts
from penstock.pipeline.tools.simulate_cli import simulate
from penstock.pipeline.tools.trace_cli import trace
from penstock.protocols.keys import KeysError
from penstock.services.runtime.errors import EXIT_LATER, SetupError
from penstock.services.runtime.plain import visible

app = typer.Typer(
    name="penstock",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
app.add_typer(launch, name="launch")


def print_version(asked: bool) -> None:
    """``--version``, which needs no command beside it."""
    if asked:
        from importlib.metadata import version

        typer.echo(f"penstock {version('penstock')}")
        raise typer.Exit(0)


@app.callback()
def command(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version, and stop.", is_eager=True, callback=print_version)
    ] = False,
) -> None:
    """Asynchronous reinforcement learning for language models.

    Start with: penstock run configs/quickstart.yaml
    """


app.add_typer(doctor, name="doctor")
app.add_typer(keys, name="keys")
app.command("join")(join)
app.command("agents")(agents)
app.command("play")(play)
app.command("page")(page)
app.command("merge")(merge)
app.command("rollback")(rollback)
app.command("rollouts")(rollouts)
app.command("plan")(plan_run)
app.command("compose-env")(compose_env)
app.command("simulate")(simulate)
app.command("trace")(trace)


def main() -> None:
    """Entry point: errors a user can mend are one clear message and exit code 2; 75 where another one runs there."""
    try:
        app(prog_name="penstock")
    except (SetupError, KeysError) as error:
        typer.echo(f"error: {visible(str(error))}", err=True)
        sys.exit(EXIT_LATER if isinstance(error, HeldError) else 2)
    except OSError as error:
        if error.errno not in FULL:
            raise
        typer.echo(f"error: cannot write: {error.strerror}; free some space, or write elsewhere", err=True)
        sys.exit(2)


@app.command()
def run(
    file: Annotated[
        Optional[str],  # noqa: UP045 - not a Path: with --resume it may be an override, with a URL in it
        typer.Argument(help="The run's config, e.g. configs/quickstart.yaml.", show_default=False),
    ] = None,
    overrides: OVERRIDES = None,
    dry_run: Annotated[
        bool, typer.Option(help="Look at everything, print the resolved config and what was found, and stop.")
    ] = False,
    resume: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Go on with the run in this folder, e.g. runs/first-try.", show_default=False),
    ] = None,
    wait_s: Annotated[float, typer.Option("--wait", hidden=True)] = 0.0,
) -> None:
    """Run everything that FILE describes on this machine: programs, Redis, broker, rollouts, reward, trainer and so on.

    Looks at data, model and functions first. Then it watches the processes, starts again what dies, and leaves
    metrics.jsonl, summary.json, report.html, logs/ and checkpoints/ in the run's folder. Ctrl-C drains, saves a
    checkpoint and stops; a second one ends it at once. --resume goes on, by itself with the config that the run has,
    with the same model and data; steps, bounds and rates may be others.

    Exit codes: 0 complete, 130 interrupted, 1 failed, 2 a setup that cannot work, 75 another one runs in the folder.

    For instance: penstock run configs/quickstart.yaml trainer.steps=50
    or: penstock run --resume runs/first-try trainer.steps=300
    """
    from penstock.pipeline.run.folder import named
    from penstock.pipeline.run.start import start

    folder = named(resume) if resume else None
    raise typer.Exit(start(RunConsole(), file, overrides or [], folder, dry_run, wait_s=wait_s))


@app.command("eval")
def evaluate(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint's folder, or a model of the hub.")],
    file: FILE,
    overrides: OVERRIDES = None,
    as_json: Annotated[bool, typer.Option("--json", help="What came of it, as one JSON object on stdout.")] = False,
) -> None:
    """Answer the evaluation sets of FILE (prompts.eval) with CHECKPOINT, and print what came of it. Trains nothing.

    The rollouts of FILE answer, by its engine; its rewards judge. prompts.eval_sampling says how often each prompt is
    answered: several times give pass@k and maj@n. Each evaluation has a folder of its own below run.folder, with the
    answers: runs/eval-…, or what run.name says.

    For instance: penstock eval runs/first-try/checkpoints/step-000150 configs/quickstart.yaml
    or: penstock eval Qwen/Qwen2.5-0.5B-Instruct configs/gsm8k.yaml prompts.eval_size=500
    """
    from penstock.pipeline.run.evaluate import evaluate as evaluate_checkpoint

    console = RunConsole(stderr=as_json)
    raise typer.Exit(evaluate_checkpoint(console, checkpoint, file, overrides or [], as_json))


@app.command()
def serve(
    actor: Annotated[
        str,
        typer.Argument(
            help="broker, rollout, gateway, reward, reference, critic, trainer, or one of the config's scorers."
        ),
    ],
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

    For instance: penstock serve rollout --config run.yaml --broker tcp://10.1.0.7:5555 --keys client.json
    """
    from penstock.pipeline.run.folder import keys_folder, named, run_name
    from penstock.pipeline.run.serve import serve as serve_actor
    from penstock.protocols.keys import load_client
    from penstock.services.runtime import registry
    from penstock.services.runtime.actor import ActorContext, end

    resolved = load(config, overrides)
    actors = registry.actors(resolved)
    if actor not in actors:
        raise ConfigError(f"ACTOR: {actor!r} is not one of {', '.join(actors)}")
    if actor != "broker" and broker is None:
        raise ConfigError(f"{actor}: give the broker's address with --broker, e.g. tcp://127.0.0.1:5555")
    folder = named(folder)
    folder.mkdir(parents=True, exist_ok=True)
    client = keys or keys_folder(folder) / "client.json"
    mine = load_client(client) if actor != "broker" and (keys or client.is_file()) else None
    threads = actors[actor].threads(resolved)
    context = ActorContext(name or default_name(actor), run_name(folder), folder, broker or "", threads, mine)
    store = os.environ.pop("PENSTOCK_STORE", None)
    end(serve_actor(actor, resolved, context, store, supervised, ready_fd))


def default_name(actor: str) -> str:
    """Of an actor alone on its host, as in a container, the same whenever it is started again."""
    host = f"{actor}-{socket.gethostname()}"
    return host if os.environ.get("PENSTOCK_ONE_PER_HOST") else f"{host}-{os.getpid()}"


app.command("prepare")(prepare)

RUN = Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)]
SOME_RUN = Annotated[Optional[Path], typer.Argument(help="A run's folder.", show_default=False)]  # noqa: UP045
BROKER = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="Instead of RUN: the broker's address, e.g. tcp://127.0.0.1:5555.", show_default=False),
]
KEYS = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(help="The run's keys/client.json, for a broker that is not on the loopback.", show_default=False),
]


@app.command()
def status(
    run: SOME_RUN = None,
    broker: BROKER = None,
    keys: KEYS = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as one JSON object.")] = False,
) -> None:
    """Print how a run stands: phase, steps, reward, lag, queues, every actor. Of a run that is over, the summary.

    For instance: penstock status runs/first-try
    or: penstock status --broker tcp://10.1.0.7:5555 --keys client.json --json
    """
    from penstock.pipeline.observe.client import find_broker, state, watching
    from penstock.pipeline.observe.terminal import View
    from penstock.pipeline.report.console import print_summary
    from penstock.pipeline.run.summary import finite
    from penstock.protocols.run_lock import came_to

    console = OwnConsole()
    over = came_to(run) if run and broker is None else None
    if run and over:
        if as_json:
            typer.echo(json.dumps(finite(over)))
        else:
            print_summary(console, over, run)
        return
    address, own_keys, folder = find_broker(run, broker, keys)
    with watching(address, own_keys, folder) as mailbox:
        now = state(mailbox, folder, whole=True)
    if as_json:
        typer.echo(json.dumps(finite(now)))
    else:
        console.print(View(console, f"penstock {now['run']}").render(now, now["restarts"]))


@app.command()
def top(run: SOME_RUN = None, broker: BROKER = None, keys: KEYS = None) -> None:
    """Watch a run live until it is over. Ctrl-C ends the watching, not the run.

    For instance: penstock top runs/first-try
    """
    from penstock.pipeline.observe.client import find_broker, follow
    from penstock.protocols.run_lock import came_to

    console = OwnConsole()
    if run and broker is None and came_to(run):
        status(run)
        return
    try:
        follow(console, *find_broker(run, broker, keys), over=lambda: run is not None and came_to(run) is not None)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


@app.command("config")
def explain_config(
    key: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(help="A key or a section, e.g. gate.max_lag or rollout.engine.", show_default=False),
    ] = None,
    markdown: Annotated[bool, typer.Option(help="Print docs/configuration.md: all keys, as one page.")] = False,
) -> None:
    """Say what a key of the config means: its type, its default, an example. Without KEY, which sections there are.

    For instance: penstock config gate.max_lag, penstock config rollout.engine, penstock config reward.functions
    """
    from penstock.pipeline.config.reference_page import page
    from penstock.pipeline.tools.config_keys import show_key, show_sections

    if markdown:
        typer.echo(page(), nl=False)
    elif key:
        show_key(OwnConsole(), key)
    else:
        show_sections(OwnConsole())


@app.command("algorithms")
def list_algorithms() -> None:
    """List the built-in advantages, losses, corrections and presets, with their papers.

    For instance: penstock algorithms; then penstock config trainer.algorithm.loss
    """
    from penstock.pipeline.tools.algorithms import show

    show(OwnConsole())


@app.command()
def ledger(run: RUN, as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line.")] = False) -> None:
    """Print which groups each step of a run trained on, and the digest of the version that it yielded.

    For instance: penstock ledger runs/first-try
    or: penstock ledger runs/first-try --json > ledger.jsonl
    """
    from penstock.pipeline.tools.ledger import show_ledger

    show_ledger(OwnConsole(), run, as_json)


@app.command()
def replay(
    run: RUN,
    step: Annotated[Optional[int], typer.Option(help="Only this step.", show_default=False)] = None,  # noqa: UP045
) -> None:
    """Redo a run's steps from its archive, offline, and compare each version's digest with the recorded one.

    Needs replay.archive: all. All steps are redone with the config that the run has now. Exit code 0 where all digests
    agree, which run.deterministic promises where no key was changed on the way. One process redoes them: where the
    trainer had several ranks, which sum in another order, digests are shown and not compared.

    For instance: penstock replay runs/first-try --step 17
    """
    from penstock.pipeline.tools.recompute import recompute

    raise typer.Exit(0 if recompute(OwnConsole(), run, step) else 1)


if __name__ == "__main__":
    main()
