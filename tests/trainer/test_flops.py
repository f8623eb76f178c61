"""A step's FLOPs, beside those that torch counts while it computes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from penstock.protocols.experience import Trajectory
from penstock.services.learning.batch import TrainingBatch
from penstock.services.learning.model_flops import ModelFlops
from penstock.services.modeling.decoder_shape import described_by
from penstock.services.modeling.flops import backward_flops, forward_flops
from penstock.services.runtime.gpu_kinds import DEVICES, peak_tflops
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from tests.trainer.rank_program import a_model

PROMPT, ANSWER = 3, 5


def a_step(groups: int = 4, n: int = 2) -> TrainingBatch:
    """Rows of one length, so that nothing is padded: torch counts padding too."""
    random = np.random.default_rng(0)
    trajectories, size = [], PROMPT + ANSWER
    for _ in range(groups):
        prompt = random.integers(2, 50, PROMPT)
        for _ in range(n):
            sampled = np.r_[np.zeros(PROMPT), np.ones(ANSWER)].astype(np.uint8)
            tokens = np.r_[prompt, random.integers(2, 50, ANSWER)].astype(np.int32)
            versions = np.where(sampled == 1, 0, -1).astype(np.int32)
            trajectories.append(Trajectory(tokens, sampled, np.zeros(size, np.float32), versions, text=""))
    rewards = random.random(groups * n).astype(np.float32)
    return TrainingBatch(trajectories, np.repeat(np.arange(groups), n), np.arange(groups * n), {"reward": rewards}, {})


@pytest.mark.parametrize(
    "given",
    [{}, {"mini_batches": 2, "epochs": 2, "algorithm": {"ratio": "proximal"}}, {"algorithm": {"entropy_share": 0.5}}],
    ids=["one pass", "several updates, and a first pass", "a pass that picks tokens"],
)
def test_a_steps_flops_are_those_that_torch_counts(given: dict[str, Any]) -> None:
    learner = Learner(a_model(), TrainerConfig.model_validate(given), 1.0)
    with FlopCounterMode(display=False) as counted:
        learner.train(a_step())
    # torch counts the half of attention that is masked as well, and of these short rows that is less than 2 %
    assert learner.flops.total == pytest.approx(counted.get_total_flops(), rel=0.02)
    learner.train(a_step())
    assert learner.flops.total == pytest.approx(counted.get_total_flops(), rel=0.02), "of one step, not of all"


def test_long_rows_are_counted_as_a_causal_mask_leaves_them() -> None:
    model, size = a_model(), 256
    shape = described_by("tiny", model.config.to_dict())
    assert shape
    ids = torch.zeros((1, size), dtype=torch.int64)
    model.config._attn_implementation = "eager"
    with FlopCounterMode(display=False) as counted:
        model(input_ids=ids, position_ids=torch.arange(size)[None]).logits.sum().backward()
    forward = forward_flops(shape, size, size, size * size)  # as eager attention computes it: whole
    assert forward + backward_flops(forward, False) == pytest.approx(counted.get_total_flops(), rel=0.02)
    assert forward_flops(shape, size, size, size * (size + 1) / 2) < 0.95 * forward


def test_an_adapters_base_has_half_the_backward() -> None:
    assert backward_flops(10, frozen=True) == 10 and backward_flops(10, frozen=False) == 20


def test_mfu_is_the_share_of_all_ranks_peaks_and_absent_where_that_is_not_known() -> None:
    shape = described_by("tiny", a_model().config.to_dict())
    assert shape and shape.counted
    flops = ModelFlops(shape, peak=100.0)
    flops.total = 4e14
    assert flops.metrics(2.0, 4) == {"mfu": pytest.approx(0.5)}
    assert ModelFlops(shape, peak=None).metrics(2.0, 4) == {} == ModelFlops(None, peak=100.0).metrics(2.0, 4)
    learner = Learner(a_model(), TrainerConfig(), 1.0)
    learner.train(a_step())
    assert learner.flops.metrics(1.0, 1) == {}, "a CPU"
    windowed = copy.deepcopy(learner.config)
    windowed.use_sliding_window = True
    flops = ModelFlops.of(windowed, False, learner.world)
    learner.flops = flops
    learner.train(a_step())
    assert flops.total == 0, "it would be a guess"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA A100-PCIE-40GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"), ("NVIDIA L40S", "L40S"), ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA A10G", None), ("NVIDIA GH200 480GB", None), ("Tesla T4", None),
        ("NVIDIA A100-SXM4-80GB MIG 7g.80gb", None), ("NVIDIA L40", None), ("", None),
    ],
)  # fmt: skip
def test_a_peak_is_known_by_the_whole_name_or_not_at_all(name: str, kind: str | None) -> None:
    assert peak_tflops(name) == (DEVICES[kind].tflops if kind else None)
