"""``penstock launch``: a run on a cluster."""

from __future__ import annotations

import os
import shlex
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, Optional

import typer

from penstock.pipeline.config import ConfigError, load
from penstock.pipeline.report.console import OwnConsole, RunConsole
from penstock.pipeline.tools.arguments import OVERRIDES
from penstock.protocols.run_lock import read_summary

launch = typer.Typer(no_args_is_help=True, help="Start a run on a cluster: Slurm, Ray, Kubernetes.")

SOME_FILE = Annotated[
    Optional[str],  # noqa: UP045 - not a Path: with --resume it may be an override
    typer.Argument(help="The run's config, e.g. configs/quickstart.yaml.", show_default=False),
]
RESUME = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(help="Go on with the run in this folder, e.g. runs/first-try.", show_default=False),
]
NETWORK = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        help="The network that all machines are on, e.g. 10.1.0.0/16. Not given: this machine's.", show_default=False
    ),
]
PULL_POLICY = Annotated[
    Optional[Literal["IfNotPresent", "Always", "Never"]],  # noqa: UP045
    typer.Option(
        help="When nodes pull the image; not given: Always where it comes from a registry by a tag, which may be "
        "another image's by now. Never for one that is on the nodes alone.",
        show_default=False,
    ),
]
SECRET = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        help="A secret whose keys become environment variables, e.g. HF_TOKEN; or PENSTOCK_STORE: store.url with its "
        "password.",
        show_default=False,
    ),
]
LOOK = Annotated[
    bool,
    typer.Option(
        "--look/--no-look",
        help="Look at all that the config names first; not where the image or the claim alone has it.",
    ),
]
EACH = Annotated[int, typer.Option(min=1, help="Rollouts in each task.")]
DRY_RUN = Annotated[bool, typer.Option(help="Look at everything, print what would be started, and start nothing.")]


@launch.command("slurm")
def on_slurm(
    file: SOME_FILE = None,
    overrides: OVERRIDES = None,
    partition: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Slurm's partition; not given: its default.", show_default=False),
    ] = None,
    time: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="Time limit, e.g. 12:00:00. A run that is not done by then is queued again.", show_default=False
        ),
    ] = None,
    sbatch: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="An option of sbatch's, for every job, e.g. --sbatch=--account=lab.", show_default=False),
    ] = None,
    gpus: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option(
            "--gpus/--no-gpus", help="Ask for GPUs; not given: where the partition has them.", show_default=False
        ),
    ] = None,
    network: NETWORK = None,
    each: EACH = 1,
    resume: RESUME = None,
    dry_run: DRY_RUN = False,
) -> None:
    """Submit a run to Slurm: one job for the run, and an array of jobs for its rollouts.

    The run's folder must be on a disk that all nodes see, and so must this Penstock. rollout.count says how many
    rollouts there are; run.elsewhere says what else has jobs of its own, e.g. run.elsewhere=\\[rollout,reference]. Near
    its time limit the run saves a checkpoint and is queued again; a rollout whose node has died is given another node.

    For instance: penstock launch slurm configs/quickstart.yaml rollout.count=4 --partition gpu --time 12:00:00
    or: penstock launch slurm configs/quickstart.yaml --dry-run --no-gpus
    """
    from penstock.pipeline.launch import slurm
    from penstock.pipeline.launch.parts import parts_of
    from penstock.pipeline.launch.ready import look_at, make_ready, resolve

    console = OwnConsole()
    file, overrides = _sorted(file, overrides, resume)
    config, origin, folder = resolve(console, Path(file) if file else None, overrides, resume, network)
    options = [f"--partition={partition}"] * bool(partition) + [f"--time={time}"] * bool(time) + (sbatch or [])
    parts = parts_of(config, slurm.offers_gpus(slurm.partitions(options)) if gpus is None else gpus, each)
    made = slurm.scripts(folder, Path.cwd(), parts, options)
    if dry_run:
        look_at(OwnConsole(stderr=True), config, folder)
        for name, text in made.items():
            typer.echo(f"# --- {folder / name}\n{text}")
        return
    slurm.check_left(folder)
    make_ready(console, config, origin, folder)
    slurm.write(folder, made)
    shown = Path(os.path.relpath(folder))
    try:
        jobs = slurm.submit(folder, parts, config.store.url)
    except ConfigError as error:
        raise ConfigError(f"{error}\nthe run is ready: penstock launch slurm --resume {shown}") from None
    for line in slurm.told(folder, shown, parts, jobs):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


@launch.command("ray")
def on_ray(
    file: SOME_FILE = None,
    overrides: OVERRIDES = None,
    address: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="The cluster's, e.g. 10.1.0.7:6379; not given: this machine's.", show_default=False),
    ] = None,
    gpus: Annotated[bool, typer.Option("--gpus/--no-gpus", help="Ask for GPUs.")] = True,
    env: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            help="An environment variable of this shell that the run's processes get, e.g. --env SERPER_KEY; several "
            "may be given. HF_*, WANDB_*, MLFLOW_*, *_API_KEY, NCCL_*, PENSTOCK_* and proxies they get anyhow, where "
            "their node has none of that name.",
            show_default=False,
        ),
    ] = None,
    network: NETWORK = None,
    each: EACH = 1,
    resume: RESUME = None,
    dry_run: DRY_RUN = False,
) -> None:
    """Run on a Ray cluster: the run and each of its rollouts are Ray actors, in one placement group.

    The run's folder must be on a disk that all machines see, and Penstock installed on each. rollout.count says how
    many rollouts there are. Whoever's machine dies is started again on another one. It ends with the run; Ctrl-C has
    the run save a checkpoint first. To leave it alone: ray job submit, as docs/clusters.md has it.

    For instance: penstock launch ray configs/quickstart.yaml --no-gpus rollout.count=4 run.folder=/shared/runs
    """
    from penstock.pipeline.launch import ray_cluster
    from penstock.pipeline.launch.parts import parts_of
    from penstock.pipeline.launch.ready import look_at, make_ready, resolve

    console = RunConsole()
    file, overrides = _sorted(file, overrides, resume)
    config, origin, folder = resolve(console, Path(file) if file else None, overrides, resume, network)
    given = env or []
    parts, handed = parts_of(config, gpus, each), ray_cluster.handed_on(os.environ, given)
    if dry_run:
        look_at(OwnConsole(stderr=True), config, folder)
        for part in parts:
            console.print(part.words, highlight=False)
        console.print(f"environment variables: {', '.join(handed) or 'none'}", highlight=False, soft_wrap=True)
        return
    make_ready(console, config, origin, folder)
    console.print(f"run folder: {folder}", highlight=False, markup=False, soft_wrap=True)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    code = ray_cluster.launch(folder, Path.cwd(), parts, handed, given, config.store.url, address, say)
    if code and (read_summary(folder) or {}).get("outcome") != "complete":
        say(f"go on with: penstock launch ray --resume {shlex.quote(str(folder))}")
    raise typer.Exit(code)


@launch.command("kubernetes")
def on_kubernetes(
    file: Annotated[Path, typer.Argument(help="The run's config, e.g. configs/grpo-0.5b.yaml.", show_default=False)],
    overrides: OVERRIDES = None,
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="The run's; not given: run.name, or the config's file.", show_default=False),
    ] = None,
    image: Annotated[
        str, typer.Option(help="Which has Penstock: the repository's Dockerfile builds it.")
    ] = "penstock:gpu",
    pull_policy: PULL_POLICY = None,
    namespace: Annotated[Optional[str], typer.Option(show_default=False, help="Of all objects.")] = None,  # noqa: UP045
    claim: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="A volume claim that is there, ReadWriteMany; not given: one is made.", show_default=False),
    ] = None,
    storage_class: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Of the claim that is made, e.g. nfs; not given: the cluster's default.", show_default=False),
    ] = None,
    storage: Annotated[str, typer.Option(help="Size of the claim that is made.")] = "200Gi",
    secret: SECRET = None,
    autoscale: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Least and most rollouts, e.g. 0:8, by KEDA: as many as have work.", show_default=False),
    ] = None,
    prometheus: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Which KEDA asks, e.g. http://prometheus.monitoring:9090.", show_default=False),
    ] = None,
    gpus: Annotated[bool, typer.Option("--gpus/--no-gpus", help="Ask for GPUs.")] = True,
    each: EACH = 1,
    look: LOOK = True,
) -> None:
    """Print manifests for Kubernetes: Jobs for the run and its rollouts, a claim for its folder, a network policy.

    Applied again with the same config, a run that was stopped goes on. Code of your own belongs into the image.

    For instance: penstock launch kubernetes configs/grpo-0.5b.yaml --name first rollout.count=4 > run.yaml
    then: kubectl apply -f run.yaml; kubectl logs -f job/penstock-first-head -c prepare (and, once that is done, -c run)
    """
    from penstock.pipeline.launch import kubernetes
    from penstock.pipeline.launch.parts import parts_of
    from penstock.pipeline.launch.ready import look_at, spread
    from penstock.services.runtime.address import reached_at

    given = [*(overrides or []), *spread(load(file, overrides))]
    config = load(file, given)
    called = kubernetes.object_name(name or config.run.name or file.stem)
    if look:
        try:
            there = load(file, [*given, *kubernetes.listening_at(reached_at("0.0.0.0"))])  # as in its pod
            look_at(OwnConsole(stderr=True), there, Path("runs") / called)
        except ConfigError as error:
            raise ConfigError(f"{error}\nwhere the image or the claim alone has what is wanted: --no-look") from None
    scaled = kubernetes.bounds(autoscale)
    options = kubernetes.Options(
        called, image, namespace, claim, storage_class, storage, pull_policy, secret, prometheus, scaled
    )
    typer.echo(kubernetes.manifests(config, parts_of(config, gpus, each), options), nl=False)


def _sorted(file: str | None, overrides: list[str] | None, resume: Path | None) -> tuple[str | None, list[str]]:
    """A first argument that is an override is none of a file's."""
    more = list(overrides or [])
    if resume and file and "=" in file:
        return None, [file, *more]
    return file, more
