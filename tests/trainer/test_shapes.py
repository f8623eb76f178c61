"""Ranks in every shape train as one process does, publish its version, and take up each other's checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import ROOT
from tests.trainer.rank_program import a_model

SHAPES: dict[str, dict[str, Any]] = {
    "two replicas of two shards": {"ranks": 4, "replicas": 2},
    "tensor parallel": {"ranks": 2, "tensor_parallel": 2},
    "two shards, tensor parallel": {"ranks": 4, "tensor_parallel": 2},
    "sequence parallel": {"ranks": 2, "sequence_parallel": 2},
    "sequence parallel, beyond the heads of keys": {"ranks": 4, "sequence_parallel": 4, "gradient_checkpointing": True},
    "two replicas, sequence parallel, an adapter": {
        "ranks": 4, "replicas": 2, "sequence_parallel": 2, "lora": {"rank": 3},
    },
    "sequence and tensor parallel": {"ranks": 4, "sequence_parallel": 2, "tensor_parallel": 2},
    "selective checkpointing, activations on the host": {
        "ranks": 2, "gradient_checkpointing": "selective", "offload_activations": True,
    },
    "everything on the host": {
        "ranks": 2, "offload": True, "gradient_checkpointing": True, "offload_activations": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_ranks_in_a_shape_are_one_process(name: str, tmp_path: Path) -> None:
    a_model().save_pretrained(tmp_path / "start")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(SHAPES[name]["ranks"]), "-m", "tests.trainer.shapes_program"]
    run = [*command, str(tmp_path), json.dumps(SHAPES[name]), "cpu"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-5000:]
