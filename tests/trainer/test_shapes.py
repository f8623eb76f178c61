"""Ranks in every shape train as one process does, publish its version, and take up each other's checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import families, seeing
from tests.e2e.runs import ROOT
from tests.trainer.rank_program import a_mixture, a_model

SEES = {"model": "qwen3_vl", "shows": True}
NADAM = {"type": "custom", "name": "torch.optim:NAdam", "options": {"momentum_decay": 0.01}, "lr": 1e-3}
MUON = {"type": "muon", "lr": 1e-2, "weight_decay": 0.1}
SHAPES: dict[str, dict[str, Any]] = {
    "two replicas of two shards": {"ranks": 4, "replicas": 2},
    "tensor parallel, feed-forward parts in tiles": {"ranks": 2, "tensor_parallel": 2, "tokens_per_mlp": 16},
    "two shards, tensor parallel": {"ranks": 4, "tensor_parallel": 2, "optimizer": NADAM},
    "sequence parallel": {"ranks": 2, "sequence_parallel": 2},
    "experts with biases, sequence parallel, windows and sinks": {
        "ranks": 2, "expert_parallel": 2, "sequence_parallel": 2, "model": "gpt_oss",
    },
    "experts, states beside attention": {
        "ranks": 2, "expert_parallel": 2, "gradient_checkpointing": True, "model": "qwen3_5_moe_text",
    },
    "sequence parallel, beyond the heads of keys": {"ranks": 4, "sequence_parallel": 4, "gradient_checkpointing": True},
    "two replicas, sequence parallel, an adapter": {
        "ranks": 4, "replicas": 2, "sequence_parallel": 2, "lora": {"rank": 3}, "tokens_per_mlp": 8,
    },
    "sequence and tensor parallel": {"ranks": 4, "sequence_parallel": 2, "tensor_parallel": 2},
    "whole layers that stand still, gathered for a micro-batch": {
        "ranks": 2, "freeze": ["model.embed_tokens.*", "model.layers.0.*", "*_norm.*"], "reshard_after": "micro_batch",
        "tokens_per_mlp": 7,
    },
    "norms and layers that stand still, tensor parallel": {
        "ranks": 2, "tensor_parallel": 2, "freeze": ["model.layers.0.*", "*.q_norm.*"],
    },
    "a pipeline's layers that stand still, on the host": {
        "ranks": 2, "pipeline_parallel": 2, "offload": True, "freeze": ["model.layers.*.mlp.*"],
    },
    "selective checkpointing, means on the host, gathered for an update": {
        "ranks": 2, "gradient_checkpointing": "selective", "offload": "optimizer", "reshard_after": "update",
        "sum_gradients": "micro_batch",
    },
    "everything on the host but what is gathered": {
        "ranks": 2, "offload": True, "gradient_checkpointing": True, "offload_activations": True,
        "reshard_after": "update", "tokens_per_mlp": 16,
    },
    "pipeline, gathered for an update, another optimizer": {
        "ranks": 2, "pipeline_parallel": 2, "reshard_after": "update", "optimizer": NADAM,
    },
    "pipeline, gradients summed after each micro-batch": {
        "ranks": 2, "pipeline_parallel": 2, "sum_gradients": "micro_batch", "gradient_checkpointing": True,
    },
    "pipeline of two shards, the head tied": {"ranks": 4, "pipeline_parallel": 2, "model": "tied"},
    "pipeline of three stages, the head tied": {"ranks": 3, "pipeline_parallel": 3, "model": "tied"},
    "pipeline of two replicas, an adapter": {
        "ranks": 4, "pipeline_parallel": 2, "replicas": 2, "lora": {"rank": 3},
    },
    "pipeline, tensor parallel": {"ranks": 4, "pipeline_parallel": 2, "tensor_parallel": 2},
    "pipeline, sequence parallel, on the host": {
        "ranks": 4, "pipeline_parallel": 2, "sequence_parallel": 2, "offload": True, "gradient_checkpointing": True,
        "offload_activations": True,
    },
    "pipeline of experts": {"ranks": 4, "pipeline_parallel": 2, "expert_parallel": 2},
    "the head in fp32, two shards": {"ranks": 2, "half": "bfloat16", "gradient_checkpointing": True},
    "fp16, the head in fp32, two shards": {"ranks": 2, "half": "float16", "gradient_checkpointing": True},
    "the head in fp32, tensor parallel": {"ranks": 2, "tensor_parallel": 2, "half": "float16"},
    "the head in fp32, pipeline, tied": {"ranks": 2, "pipeline_parallel": 2, "half": "bfloat16", "model": "tied"},
    "experts, whose router stands still": {"ranks": 2, "expert_parallel": 2, "freeze": ["*.mlp.gate.*"]},
    "towers that learn": {"ranks": 2, "train_towers": True, **SEES},
    "towers that learn, tensor parallel": {"ranks": 2, "tensor_parallel": 2, "train_towers": True, **SEES},
    "experts that files have turned, towers that learn": {
        "ranks": 2, "expert_parallel": 2, "train_towers": True, "shows": True, "model": "qwen3_vl_moe",
    },
    "pictures, sequence parallel": {"ranks": 2, "sequence_parallel": 2, "gradient_checkpointing": True, **SEES},
    "towers that learn, sequence parallel": {
        "ranks": 2, "sequence_parallel": 2, "train_towers": True, "gradient_checkpointing": True, "shows": True,
        "model": "qwen2_5_vl",
    },
    "what fits them to the decoder learns, on the host": {
        "ranks": 2, "offload": True, "train_towers": True, "freeze": ["model.vision_tower.*"], "shows": True,
        "model": "gemma3",
    },
    "towers that learn, two replicas of two shards": {
        "ranks": 4, "replicas": 2, "train_towers": True, "gradient_checkpointing": "selective", "shows": True,
        "model": "qwen3_5",
    },
    "experts, an adapter": {"ranks": 2, "expert_parallel": 2, "lora": {"rank": 3}},
    "experts, sequence parallel": {"ranks": 2, "expert_parallel": 2, "sequence_parallel": 2},
    "two replicas of experts, gathered for an update": {
        "ranks": 4, "replicas": 2, "expert_parallel": 2, "reshard_after": "update",
    },
    "two shards of experts, balanced": {
        "ranks": 4, "expert_parallel": 2, "gradient_checkpointing": True, "algorithm": {"router_balance": 0.1},
    },
    "experts, tensor parallel": {"ranks": 4, "expert_parallel": 2, "tensor_parallel": 2},
    "muon on the host, rows that do not divide": {"ranks": 3, "offload": True, "optimizer": MUON},
    "muon, two shards, tensor parallel": {"ranks": 4, "tensor_parallel": 2, "optimizer": MUON},
    "muon, two shards, tensor parallel, means on the host": {
        "ranks": 4, "tensor_parallel": 2, "offload": "optimizer", "optimizer": MUON,
    },
    "an adapter of fewer rows than ranks, means on the host": {
        "ranks": 3, "offload": "optimizer", "lora": {"rank": 2},
    },
    "muon, pipeline of two replicas, an adapter": {
        "ranks": 4, "pipeline_parallel": 2, "replicas": 2, "lora": {"rank": 3}, "optimizer": MUON,
    },
    "muon, two shards of experts, tensor parallel": {
        "ranks": 4, "expert_parallel": 2, "tensor_parallel": 2, "optimizer": MUON,
    },
}  # fmt: skip


OFTEN = (
    "two replicas of two shards", "two shards, tensor parallel", "sequence parallel, beyond the heads of keys",
)  # fmt: skip
"""Of those with four ranks; the others are products of what these and smaller ones have."""
SELDOM = (
    "norms and layers that stand still, tensor parallel", "experts, whose router stands still", "experts, an adapter",
    "experts with biases, sequence parallel, windows and sinks",
    "a pipeline's layers that stand still, on the host", "pipeline, gradients summed after each micro-batch",
    "the head in fp32, tensor parallel", "the head in fp32, pipeline, tied", "towers that learn, tensor parallel",
    "pictures, sequence parallel", "towers that learn, sequence parallel", "experts, sequence parallel",
    "what fits them to the decoder learns, on the host", "experts that files have turned, towers that learn",
)  # fmt: skip
"""Of those with two, likewise."""


BY = {"T": "tensor_parallel", "S": "sequence_parallel", "P": "pipeline_parallel", "E": "expert_parallel"}


@pytest.mark.chaos
@pytest.mark.parametrize("by", BY)
def test_families_are_shared_as_the_page_says(by: str, tmp_path: Path) -> None:
    names = [family for family, (_, shared, *_) in families.SAID.items() if by in shared.split()]
    for family in names:
        families.write(family, tmp_path / family)
    check_shapes({family: {"ranks": 2, BY[by]: 2, "model": family} for family in names}, tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([name for name in SHAPES if SHAPES[name]["ranks"] == 2 and name not in SELDOM], id="two ranks"),
        pytest.param(SELDOM, id="two, products", marks=pytest.mark.chaos),
        pytest.param([name for name in SHAPES if SHAPES[name]["ranks"] == 3], id="three"),
        pytest.param(OFTEN, id="four"),
        pytest.param(
            [name for name in SHAPES if SHAPES[name]["ranks"] == 4 and name not in OFTEN], id="products",
            marks=pytest.mark.chaos,
        ),
    ],
)  # fmt: skip
def test_ranks_in_a_shape_are_one_process(names: Sequence[str], tmp_path: Path) -> None:
    a_model().save_pretrained(tmp_path / "start")
    a_model(tie_word_embeddings=True, num_hidden_layers=4).save_pretrained(tmp_path / "tied")
    a_mixture().save_pretrained(tmp_path / "mixture")
    wanted = {name: SHAPES[name] for name in names}
    for shape in wanted.values():
        if (family := shape.get("model", "tied")) != "tied":
            (seeing if shape.get("shows") else families).write(family, tmp_path / family)
    check_shapes(wanted, tmp_path)


def check_shapes(shapes: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Each of ``shapes``, all of as many ranks, is as one process is; ``tmp_path`` has the models."""
    (ranks,) = {shape["ranks"] for shape in shapes.values()}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    run = [*command, "-m", "tests.trainer.shapes_program", str(tmp_path), json.dumps(shapes), "cpu"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-5000:]
