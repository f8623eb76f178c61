"""A trainer's speed and memory beside the planner's numbers and the GPU's data sheet."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.pipeline.config import load
from penstock.pipeline.resources.model_files import config_file
from penstock.pipeline.resources.model_shape import shape_of
from penstock.pipeline.resources.trainer_memory import OVERHEAD_GIB, trainer_gib
from penstock.protocols.experience import Trajectory
from penstock.services.learning.batch import TrainingBatch
from penstock.services.modeling.parallel.start import load_trainable
from penstock.services.modeling.parallel.world import World
from penstock.services.trainer.learner import Learner
from penstock.services.trainer.profiling import profiled
from tests.e2e.runs import ROOT
from tests.gpu.machine import GIB, Machine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

PROMPT, ANSWER = 128, 896


def some_steps(count: int, vocabulary: int, groups: int) -> list[TrainingBatch]:
    """Groups of 8 answers of one length."""
    random = np.random.default_rng(0)
    steps = []
    for _ in range(count):
        trajectories = []
        for _ in range(groups):
            prompt = random.integers(2, vocabulary, PROMPT)
            for _ in range(8):
                tokens = np.concatenate([prompt, random.integers(2, vocabulary, ANSWER)]).astype(np.int32)
                mask = np.r_[np.zeros(PROMPT), np.ones(ANSWER)].astype(np.uint8)
                versions = np.where(mask == 1, 0, -1).astype(np.int32)
                logprobs = np.where(mask == 1, -10.0, 0.0).astype(np.float32)
                trajectories.append(Trajectory(tokens, mask, logprobs, versions, text="", finish="length"))
        rewards = random.random(8 * groups).astype(np.float32)
        steps.append(
            TrainingBatch(trajectories, np.repeat(np.arange(groups), 8), np.arange(groups * 8), {"reward": rewards}, {})
        )
    return steps


def test_the_peak_is_the_plans_and_the_gpu_is_busy(
    tmp_path: Path, machine: Machine, note: Callable[[str, str], None]
) -> None:
    """configs/grpo-0.5b.yaml's model and micro-batches, with random weights; a rehearsal takes two layers of it."""
    config = load(ROOT / "configs" / "grpo-0.5b.yaml", ["trainer.algorithm.kl.coefficient=0"])
    shape = shape_of(config)
    assert shape is not None
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(config_file(config), folder / "config.json")
    if machine.rehearsed:
        about = json.loads((folder / "config.json").read_text())
        about |= {"num_hidden_layers": 2, "vocab_size": 512, "layer_types": None, "max_window_layers": 2}
        (folder / "config.json").write_text(json.dumps(about))
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).save_pretrained(folder)
    world = World(machine.device)
    learner = Learner(load_trainable(str(folder), world, machine.device, "bfloat16"), config.trainer, 1.0, world)
    steps = some_steps(3, learner.model.config.vocab_size, 1 if machine.rehearsed else 8)
    learner.train(steps[0])  # Adam's moments are made, and kernels chosen
    machine.settle()
    machine.forget_peak()
    started = time.monotonic()
    for step in steps[1:]:
        learner.train(step)
    machine.settle()
    seconds = (time.monotonic() - started) / len(steps[1:])
    unique = len(steps[1].trajectories) // 8 * (PROMPT + 8 * ANSWER)  # a prompt is computed once
    teraflops = learner.flops.total / seconds / 1e12  # of the last step: they are of one size
    share = f", MFU {found['mfu']:.0%}" if (found := learner.flops.metrics(seconds, 1)) else ""
    note("trainer, 0.5 B, one GPU", f"{unique / seconds:,.0f} tokens/s, {teraflops:.1f} TFLOP/s{share}")
    if not machine.rehearsed:
        stage = 2 * shape.parameters / GIB  # the plan counts a version that is being published; none is, here
        plan, peak = trainer_gib(shape, config.trainer) - OVERHEAD_GIB - stage, machine.peak_gib()
        note("peak of the allocator beside the plan", f"{peak:.1f} GiB, planned {plan:.1f}: {peak / plan:.2f}")
        assert peak == pytest.approx(plan, rel=0.15)


@pytest.mark.skipif("not torch.cuda.is_available()", reason="a CPU's allocator has no history")
def test_what_lies_on_the_gpu_in_a_step_is_shown_also_where_it_does_not_fit(tmp_path: Path, machine: Machine) -> None:
    with profiled(3, [3], tmp_path / "profiles", "trainer", machine.device):
        torch.ones(1 << 20, device=machine.device).sum()
    with pytest.raises(torch.OutOfMemoryError), profiled(4, [4], tmp_path / "profiles", "trainer", machine.device):
        torch.empty(1 << 45, device=machine.device)
    for step in (3, 4):
        page = (tmp_path / "profiles" / f"trainer-step-{step:06d}-memory.html").read_text()
        assert "Active Memory Timeline" in page and len(page) > 1000
    assert (tmp_path / "profiles" / "trainer-step-000003.json.gz").exists()
