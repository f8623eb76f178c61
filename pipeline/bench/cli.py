"""The command ``penstock bench``."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Optional

import typer

from penstock.pipeline.config import ConfigError
from penstock.pipeline.report.console import OwnConsole

bench = typer.Typer(help="Benchmarks, each beside a peer or a physical limit.", no_args_is_help=True)


def _chosen(option: str, text: str, known: Collection[str]) -> list[str]:
    """Those between commas, of which each must be ``known``. Raises `ConfigError`."""
    found = text.split(",")
    if unknown := [name for name in found if name not in known]:
        raise ConfigError(f"{option}: {unknown[0]!r} is not one of: {', '.join(known)}")
    return found


def _numbers(option: str, text: str, least: int = 0) -> list[int]:
    """Whole numbers between commas, none below ``least``. Raises `ConfigError`."""
    if not all(each.strip().isdecimal() for each in text.split(",")):
        raise ConfigError(f"{option}: {text!r} is not whole numbers with commas between them, e.g. 0,4")
    numbers = [int(each) for each in text.split(",")]
    if min(numbers) < least:
        raise ConfigError(f"{option}: {text!r} has {min(numbers)}, and each must be at least {least}")
    return numbers


@bench.command("generate")
def bench_generate(
    model: Annotated[
        str | None,
        typer.Option(help="A model folder or hub name; by default the quickstart's size.", show_default=False),
    ] = None,
    engine: Annotated[str, typer.Option(help="torch, or vllm beside plain vLLM.")] = "torch",
    requests: Annotated[
        int, typer.Option(min=1, help="Requests, each with a prompt and an answer of random length.")
    ] = 512,
    batch: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Sequences decoded at once, by both; 128, and 32 for vllm.", show_default=False),
    ] = None,
    threads: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Compute threads, for both; 2, and 1 for vllm.", show_default=False),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, in turns; the median counts.")] = 3,
    seed: int = 0,
) -> None:
    """Tokens/s of an engine beside the plain thing (model.generate, AsyncLLM), on a mix of prompt and answer lengths.

    For vllm also the pause of a weight update, beside vLLM's own cycle.

    For instance: penstock bench generate --requests 128 --repeats 1
    """
    if engine == "vllm":
        from penstock.pipeline.bench.generate_vllm import bench as bench_vllm

        bench_vllm(OwnConsole(), model, requests, batch or 32, threads or 1, repeats, seed)
    elif engine == "torch":
        from penstock.pipeline.bench.generate import bench as bench_torch

        bench_torch(OwnConsole(), model, requests, batch or 128, threads or 2, repeats, seed)
    else:
        raise ConfigError(f"--engine: {engine!r} is not one of: torch, vllm")


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
    """Wall-clock to a 5-step mean reward above 0.9, and tokens/s, beside another trainer on the same task.

    For instance: penstock bench peers --peer trl --seeds 1
    """
    from penstock.pipeline.bench.peers import bench_trl, check

    if peer != "trl":
        raise ConfigError(f"--peer: {peer!r} is not one of: trl")
    check(config, "peers")
    bench_trl(OwnConsole(), config, folder, steps, list(range(seeds)), threads)


@bench.command("scoring")
def bench_scoring(
    config: Annotated[Path, typer.Option(help="The task: the sort task with a tiny model.")] = Path(
        "configs/quickstart.yaml"
    ),
    folder: Annotated[Path, typer.Option(help="Where the runs go.")] = Path("runs/bench-scoring"),
    lags: Annotated[str, typer.Option(help="gate.max_lag of each run; 2/32: with gate.window=32.")] = "0,2,4,2/32,4/32",
    steps: Annotated[int, typer.Option(min=2, help="Steps at max_lag 0; with more lag accordingly more.")] = 16,
    mean: Annotated[float, typer.Option(help="Seconds that the judge takes on average; at most 8 times that.")] = 0.5,
    parts: Annotated[str, typer.Option(help="runs; trl: beside TRL; calls: 20,000 calls alone.")] = "runs,trl,calls",
) -> None:
    """Steps/s with a reward that waits, by how old experience may be, beside TRL with the same async function.

    For instance: penstock bench scoring --lags 0,4 --parts runs
    """
    from penstock.pipeline.bench.peers import check
    from penstock.pipeline.bench.scoring import bench as run_bench

    check(config, "scoring")
    _numbers("--lags", lags.replace("/", ","))
    chosen = _chosen("--parts", parts, ("runs", "trl", "calls"))
    run_bench(OwnConsole(), config, folder, lags.split(","), steps, mean, chosen)


@bench.command("gateway")
def bench_gateway(
    config: Annotated[Path, typer.Option(help="The task: the sort task with a tiny model, and a gateway.")] = Path(
        "configs/agent.yaml"
    ),
    folder: Annotated[Path, typer.Option(help="Where the runs go.")] = Path("runs/bench-gateway"),
    sessions: Annotated[int, typer.Option(help="Agents at once, under load.")] = 512,
    think: Annotated[float, typer.Option(help="Seconds that they pause before a turn, on average.")] = 10.0,
    lags: Annotated[str, typer.Option(help="gate.max_lag of the runs whose tools wait.")] = "0,4",
    steps: Annotated[int, typer.Option(min=2, help="Steps of each run; where tools wait, at max_lag 0.")] = 20,
    tool: Annotated[float, typer.Option(help="Seconds that a tool takes on average; at most 8 times that.")] = 1.0,
    parts: Annotated[str, typer.Option(help="load; tools: that wait; trl: the same beside TRL.")] = "load,tools,trl",
) -> None:
    """What the gateway adds to a turn beside the engine alone, under load; and steps/s of agents whose tools wait, by
    how old experience may be, beside TRL's synchronous loop.

    For instance: penstock bench gateway --sessions 128 --parts load
    """
    from penstock.pipeline.bench.gateway import bench as run_bench
    from penstock.pipeline.bench.peers import check

    check(config, "gateway")
    chosen = _chosen("--parts", parts, ("load", "tools", "trl"))
    run_bench(OwnConsole(), config, folder, sessions, think, _numbers("--lags", lags), steps, tool, chosen)


@bench.command("lag")
def bench_lag(
    config: Annotated[Path, typer.Option(help="The task.")] = Path("configs/quickstart.yaml"),
    folder: Annotated[Path, typer.Option(help="Where the runs go; those that it has are kept.")] = Path(
        "runs/bench-lag"
    ),
    lags: Annotated[str, typer.Option(help="gate.max_lag of the runs: how many versions old a token may be.")] = (
        "0,1,2,4,8"
    ),
    corrections: Annotated[str, typer.Option(help="What corrects for it.")] = (
        "none,token-tis,icepop,sequence-mask,vespo,topr,m2po,decoupled"
    ),
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each run.")] = 60,
    rate: Annotated[float, typer.Option(help="Learning rate; a large one makes age cost more.")] = 1e-3,
) -> None:
    """What old experience costs: the reward after some steps, by the bound on its age and by what corrects for it.

    For instance: penstock bench lag --lags 0,8 --corrections none,token-tis --seeds 1
    """
    from penstock.pipeline.bench.lag import CORRECTIONS
    from penstock.pipeline.bench.lag import bench as run_bench

    chosen = _chosen("--corrections", corrections, CORRECTIONS)
    run_bench(OwnConsole(), config, folder, _numbers("--lags", lags), chosen, seeds, steps, rate)


@bench.command("broker")
def bench_broker(
    rollouts: Annotated[str, typer.Option(help="Simulated rollouts, comma-separated.")] = "1,16,256",
    groups: Annotated[int, typer.Option(min=1, help="Groups in each measurement.")] = 3000,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each of a group's 8 trajectories.")] = 256,
) -> None:
    """Groups/s and MB/s from lease to durable, beside raw ZeroMQ and raw Redis in the same run.

    For instance: penstock bench broker --rollouts 16,256 --groups 1000
    """
    from penstock.pipeline.bench.broker import bench as run_bench

    run_bench(OwnConsole(), _numbers("--rollouts", rollouts, 1), groups, tokens)


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
    """GB/s of the weight channel beside memcpy (shm) and a bare broadcast (gloo), and what rollouts feel of it.

    For instance: penstock bench weights --sizes 130 --receivers 2 --parts transfer
    """
    from penstock.pipeline.bench.weights import SHAPES
    from penstock.pipeline.bench.weights import bench as run_bench

    asked = [int(size) for size in _chosen("--sizes", sizes, [str(size) for size in SHAPES])]
    counts, over = _numbers("--receivers", receivers, 1), _chosen("--transports", transports, ("shm", "gloo"))
    chosen = _chosen("--parts", parts, ("transfer", "pause", "elastic", "sparse"))
    run_bench(OwnConsole(), asked, counts, over, threads, chosen)


@bench.command("memory")
def bench_memory(
    files: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Argument(help="Configs; by default configs/grpo-*.yaml.", show_default=False),
    ] = None,
    grid: Annotated[
        bool, typer.Option("--grid", help="The trainer on 8, 64 and 512 ranks, with each means to spare memory.")
    ] = False,
    layers: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="With --grid: cut models to so many layers, which takes minutes.", show_default="all"),
    ] = None,
) -> None:
    """Peak GiB of trainer and reference by their own code on tensors without contents, beside the plan of --dry-run.

    Needs no GPU, and half a GiB of memory.

    For instance: penstock bench memory configs/grpo-8b.yaml
    or: penstock bench memory --grid --layers 8
    """
    paths = files or sorted(Path("configs").glob("grpo-*.yaml"))
    if not paths:
        raise ConfigError("FILES: there is no configs/grpo-*.yaml here; name a config")
    if layers and not grid:
        raise typer.BadParameter("--layers goes with --grid")
    if grid:
        from penstock.pipeline.bench.memory_grid import bench as bench_grid

        bench_grid(OwnConsole(), paths, layers)
        return
    from penstock.pipeline.bench.memory import bench as bench_peaks

    bench_peaks(OwnConsole(), paths)


@bench.command("trainer")
def bench_trainer(
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="A model folder or hub name; by default a random one of 4 layers.", show_default=False),
    ] = None,
    groups: Annotated[int, typer.Option(min=1, help="Groups of the step.")] = 8,
    n: Annotated[int, typer.Option(min=2, help="Trajectories of each group.")] = 8,
    tokens: Annotated[int, typer.Option(min=1152, help="Tokens at once, padding included.")] = 4096,
    repeats: Annotated[int, typer.Option(min=1, help="Steps of each way, in turns; the median counts.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads, for all.")] = 2,
    peer: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="trl: its loss too (installed into this environment on demand).", show_default=False),
    ] = None,
) -> None:
    """Tokens/s of a training step on answers of very different lengths: packed, padded, and by TRL.

    For instance: penstock bench trainer --peer trl
    """
    from penstock.pipeline.bench.trainer import bench as bench_step

    if peer not in (None, "trl"):
        raise ConfigError(f"--peer: {peer!r} is not one of: trl")
    bench_step(OwnConsole(), model, groups, n, tokens, repeats, threads, trl=peer == "trl")


@bench.command("soak")
def bench_soak(
    steps: Annotated[int, typer.Option(help="Tiny training steps.")] = 5000,
    every: Annotated[int, typer.Option(help="Steps between two looks at the memory.")] = 50,
    config: Annotated[Path, typer.Option(help="The config that is made tiny.")] = Path("configs/quickstart.yaml"),
    folder: Annotated[Path, typer.Option(help="Where run, soak.csv and soak.svg go.")] = Path("runs/bench-soak"),
) -> None:
    """Thousands of tiny steps: memory of every process and of Redis, and its growth per 1,000 steps.

    Exit code 0 where all of it is below 1 % per 1,000 steps, after the first fifth.

    For instance: penstock bench soak --steps 1000
    """
    from penstock.pipeline.bench.soak import bench as run_bench

    raise typer.Exit(0 if run_bench(OwnConsole(), config, folder, steps, every) else 1)


@bench.command("simulate")
def bench_simulate(
    config: Annotated[Path, typer.Option(help="The task.")] = Path("configs/quickstart.yaml"),
    folder: Annotated[Path, typer.Option(help="Where the runs go.")] = Path("runs/bench-simulate"),
    steps: Annotated[int, typer.Option(min=20, help="Training steps of each run.")] = 50,
) -> None:
    """Five real runs beside what `penstock simulate` says of them: lag, rollouts and a judge's delay are varied.

    For instance: penstock bench simulate --steps 30
    """
    from penstock.pipeline.bench.simulate import bench as bench_runs

    bench_runs(OwnConsole(), config, folder, steps)
