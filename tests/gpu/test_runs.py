"""Whole runs on GPUs: every transport, several ranks, vLLM over two GPUs, a stalled receiver, determinism."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.pipeline.config import load
from penstock.pipeline.models.make_tiny import make_tiny
from penstock.pipeline.run.summary import steps_of
from penstock.services.modeling.dtypes import HALVES
from tests.e2e.runs import QUICKSTART, ROOT, Run, check_promises
from tests.e2e.test_vllm import VLLM, check_versions
from tests.gpu.machine import Machine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
Note = Callable[[str, str], None]

ON_GPU = 2e-3
"""How close a version redone on the CPU is to the one that a GPU trained: AdamW makes much of what they round apart."""
LARGER = ["model.hidden_size=1024", "model.intermediate_size=4096", "model.layers=16", "model.heads=16",
          "model.kv_heads=8", "model.head_dim=64", "model.dtype=bfloat16", "model.warm_start.steps=2",
          "model.warm_start.batch=8"]  # fmt: skip
"""270 million parameters: a publish takes long enough to be measured."""


def size(machine: Machine) -> list[str]:
    return ["model.dtype=bfloat16"] if machine.rehearsed else LARGER


def loads(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "weights.jsonl").read_text().splitlines()]


def publishes(run: Run, transport: str) -> str:
    """Seconds of a publish by ``transport``; where bytes were sent, GB/s as nccl-tests counts a broadcast's."""
    rows = [row for row in loads(run) if row["transport"] == transport and row["version"] > 0]
    assert rows, f"nothing went by {transport}: {[row['transport'] for row in loads(run)]}"
    pause = statistics.median(row["pause_s"] for row in rows)
    sent = [row for row in rows if row.get("bytes_sent")]
    if not sent:
        seconds = statistics.median(row["gather_s"] for row in rows if "gather_s" in row)
        return f"{seconds:.3f} s to write what is mapped, pause {1e3 * pause:.1f} ms"
    seconds = statistics.median(row["transfer_s"] for row in sent)
    rate = statistics.median(row["bytes_sent"] / row["transfer_s"] for row in sent) / 1e9
    size = statistics.median(row["bytes_sent"] for row in sent) / 1e6
    return f"{seconds:.3f} s for {size:.0f} MB, {rate:.1f} GB/s, pause {1e3 * pause:.1f} ms"


@pytest.mark.parametrize("dtype", HALVES)
def test_the_quickstart(tmp_path: Path, dtype: str, machine: Machine, note: Note) -> None:
    run = Run(tmp_path, [f"model.dtype={dtype}"])
    summary = run.wait(500)
    check_promises(summary)
    assert summary["reward_last"] > 0.9
    note(f"quickstart in {dtype}", f"reward {summary['reward_last']:.3f} in {summary['train_s']:.0f} s")
    found = json.loads((run.folder / "canary.json").read_text())
    note(f"canary in {dtype}", f"largest of eight loads {max(found['seen']):.4f}, bound {found['tolerance']:.4f}")


def test_trainer_and_engine_share_a_gpus_memory(tmp_path: Path, machine: Machine, note: Note) -> None:
    """CUDA IPC: the version is mapped, not sent; with several GPUs they would not share one by themselves."""
    transport = machine.transport("cuda_ipc")
    only = [*size(machine), f"weights.transport={transport}", "rollout.count=1", "trainer.steps=10"]
    run = Run(tmp_path, only, env={} if machine.rehearsed else {"CUDA_VISIBLE_DEVICES": machine.first()})
    check_promises(run.wait(400))
    note(f"publish by {transport}, one GPU", publishes(run, transport))


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_they_take_turns_at_one_gpu(tmp_path: Path, machine: Machine, note: Note, engine: str) -> None:
    """Engine and trainer with nearly all of its memory each."""
    if engine == "vllm":
        pytest.importorskip("vllm")
    made = [*VLLM, "rollout.engine.vllm.gpu_memory_utilization=0.8"] if engine == "vllm" else []
    keys = ["run.placement=colocated", "rollout.count=1", "trainer.steps=10", "gate.max_lag=1"]
    run = Run(tmp_path, [*size(machine), *made, *keys])
    check_promises(run.wait(500))
    waits = [row["turn_wait_s"] for row in steps_of(run.folder)]
    note(f"colocated, {engine}", f"the trainer waits {statistics.median(waits):.2f} s for its turn")


@pytest.mark.gpu(2)
def test_a_version_goes_from_gpu_to_gpu_under_load(tmp_path: Path, machine: Machine, note: Note) -> None:
    transport = machine.transport("nccl")
    only = ["rollout.count=1", "trainer.algorithm.kl.coefficient=0", "weights.bucket_mb=64"]
    run = Run(tmp_path, [*size(machine), *only, f"weights.transport={transport}", "trainer.steps=15"])
    check_promises(run.wait(400))
    note(f"publish by {transport}, one rank to one engine", publishes(run, transport))


@pytest.mark.gpu(3)
def test_two_ranks_publish_under_load(tmp_path: Path, machine: Machine, note: Note) -> None:
    transport = machine.transport("nccl")
    only = ["rollout.count=1", "trainer.algorithm.kl.coefficient=0", "trainer.ranks=2", "weights.bucket_mb=64"]
    run = Run(tmp_path, [*size(machine), *only, f"weights.transport={transport}", "trainer.steps=15"])
    check_promises(run.wait(500))
    note(f"publish by {transport}, two ranks to one engine", publishes(run, transport))


@pytest.mark.gpu(3)
def test_a_stalled_receiver_costs_its_epoch_alone(tmp_path: Path, machine: Machine, note: Note) -> None:
    """Stopped with SIGSTOP amid versions, and let go on later: the trainer lives, and the other is served."""
    transport, stall_s = machine.transport("nccl"), 3
    only = ["rollout.count=2", "trainer.algorithm.kl.coefficient=0", "trainer.steps=40", f"weights.stall_s={stall_s}",
            "broker.dead_after_s=6"]  # fmt: skip
    run = Run(tmp_path, ["model.dtype=bfloat16", f"weights.transport={transport}", *only])
    run.wait_for_step(8, 200)
    stalled = run.actors()["rollout-1"]
    stalled.suspend()
    began = time.monotonic()
    try:
        run.wait_for_step(16, 60)
    finally:
        stalled.resume()
    note(f"eight steps beside a receiver that stalls, stall_s={stall_s}", f"{time.monotonic() - began:.1f} s")
    summary = run.wait(300)
    check_promises(summary)
    assert summary["restarts"] == 0


def test_a_deterministic_run_is_replayed_bit_for_bit(tmp_path: Path, machine: Machine) -> None:
    run = Run(tmp_path, ["run.deterministic=true", "model.dtype=bfloat16", "trainer.steps=12"])
    check_promises(run.wait(300))
    command = [sys.executable, "-m", "penstock.pipeline.cli", "replay", str(run.folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0 and "12 of 12 versions" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.vllm
def test_vllm_with_cuda_graphs_serves_what_it_was_told(tmp_path: Path, machine: Machine) -> None:
    """In fp32, so that a token of an older version cannot hide behind rounding."""
    pytest.importorskip("vllm")
    graphs = f"rollout.engine.vllm.enforce_eager={'true' if machine.rehearsed else 'false'}"
    more = ["rollout.engine.kv_on_update=recompute", "trainer.steps=20", "weights.transport=auto"]
    share = [] if machine.rehearsed else ["rollout.engine.vllm.gpu_memory_utilization=0.4"]
    run = Run(tmp_path, [*VLLM, graphs, *more, *share])
    check_promises(run.wait(500))
    assert check_versions(run.folder, 15, ON_GPU) > 0


@pytest.mark.vllm
@pytest.mark.gpu(3)
def test_vllm_over_two_gpus_loads_by_nccl(tmp_path: Path, machine: Machine, note: Note) -> None:
    pytest.importorskip("vllm")
    transport = machine.transport("nccl")
    graphs = f"rollout.engine.vllm.enforce_eager={'true' if machine.rehearsed else 'false'}"
    only = ["rollout.engine.vllm.tensor_parallel_size=2", "trainer.algorithm.kl.coefficient=0", "trainer.steps=20"]
    more = ["rollout.engine.kv_on_update=recompute", f"weights.transport={transport}"]
    run = Run(tmp_path, [*VLLM, graphs, *only, *more])
    check_promises(run.wait(500))
    assert check_versions(run.folder, 15, ON_GPU) > 0
    note(f"publish by {transport} into two vLLM workers", publishes(run, transport))


@pytest.mark.vllm
def test_the_shipped_config_takes_some_steps(tmp_path: Path, machine: Machine, note: Note) -> None:
    """configs/grpo-0.5b.yaml on a small model from disk, and a task that is here."""
    pytest.importorskip("vllm")
    model = tmp_path / "small"
    make_tiny(load(QUICKSTART, [] if machine.rehearsed else LARGER), model)
    local = [f"model.path={model / 'model'}", "prompts.train={type: sort}", "prompts.eval=null", "trainer.steps=5"]
    small = ["rollout.engine.max_length=64", "rollout.sampling.max_new_tokens=12", "rollout.engine.max_sequences=64",
             "reward.functions=[{function: exact_match}]", "trainer.checkpoint.every=5"]  # fmt: skip
    if machine.rehearsed:
        small.append("rollout.engine.vllm={enforce_eager: true}")
    run = Run(tmp_path, [*local, *small], config=ROOT / "configs" / "grpo-0.5b.yaml")
    summary = run.wait(500)
    check_promises(summary)
    note("configs/grpo-0.5b.yaml, five steps", f"{summary['train_s']:.0f} s, start to end {summary['wall_s']:.0f} s")
