"""A reference whose layers lie on two GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from penstock.protocols.columns import REFERENCE
from penstock.protocols.experience import Group, Prompt
from penstock.services.reference.config import ReferenceConfig
from penstock.services.reference.service import Reference
from penstock.services.runtime.scorer import ScoringTask
from tests.conftest import TINY, make_trajectory

LARGER = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 16,
    "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.mark.gpu(2, cuda_only=True)
def test_a_reference_over_two_gpus_says_the_same(tmp_path: Path, note: Callable[[str, str], None]) -> None:
    """Awake, and after it has slept; and how much faster two are, of which one begins while the other goes on."""
    Qwen3ForCausalLM(Qwen3Config(**{**TINY, **LARGER})).save_pretrained(tmp_path)
    random = np.random.default_rng(0)
    tasks = [ScoringTask(("train", n), _long(random, n), (REFERENCE,), {}, 0) for n in range(64)]
    found: dict[int, list[np.ndarray]] = {}
    took = {}
    for gpus in (1, 2):
        config = ReferenceConfig(gpus=gpus, tokens_per_batch=8192)
        reference = Reference(config, str(tmp_path), "bfloat16", 1.0, False, tmp_path)
        layers = [next(layer.parameters()).device.index for layer in reference._frozen.model.model.layers]
        assert layers == sorted(layers) and set(layers) == set(range(gpus))
        for _ in range(2):
            begun, said, left = time.monotonic(), {}, tasks
            while left:
                left = list(reference.score(left, lambda task, _, values: said.update({task.group.number: values})))  # noqa: B023
            took[gpus] = time.monotonic() - begun
            found.setdefault(gpus, []).append(np.concatenate([said[task.group.number] for task in tasks]))
            reference.sleep()
            assert not any(parameter.untyped_storage().nbytes() for parameter in reference._frozen.model.parameters())
            reference.wake()
        np.testing.assert_array_equal(*found[gpus])
        del reference
        torch.cuda.empty_cache()
    np.testing.assert_allclose(found[2][0], found[1][0], atol=0.05)
    note("a reference over two GPUs, beside one", f"{took[1] / took[2]:.2f} times as fast")


def _long(random: np.random.Generator, number: int) -> Group:
    """Answers that fill passes."""
    prompt = random.integers(2, 50, 100).astype(np.int32)
    trajectories = [make_trajectory(random, prompt, int(random.integers(800, 1200)), (0,)) for _ in range(8)]
    return Group(number, Prompt(index=number, text="p", truth="t"), trajectories)
