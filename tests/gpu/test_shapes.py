"""Two GPUs in each shape train as one does, over NCCL: the program of tests/trainer/test_shapes.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import ROOT
from tests.gpu.machine import Machine
from tests.trainer.rank_program import a_model
from tests.trainer.test_shapes import MUON, NADAM

ASGD = {"type": "custom", "name": "torch.optim:ASGD", "lr": 1e-2}
"""Its numbers lie on the device, NAdam's on the host."""

SHAPES: list[dict[str, Any]] = [
    {}, {"replicas": 2}, {"tensor_parallel": 2}, {"sequence_parallel": 2}, {"pipeline_parallel": 2},
    {"offload": True}, {"optimizer": MUON}, {"offload": True, "optimizer": MUON},
    {"offload": "optimizer"}, {"offload": "optimizer", "optimizer": MUON},
    {"gradient_checkpointing": "selective"}, {"gradient_checkpointing": True, "offload_activations": True},
    {"reshard_after": "micro_batch"}, {"reshard_after": "update", "tokens_per_mlp": 16}, {"half": "float16"},
    {"optimizer": NADAM}, {"optimizer": ASGD},
]  # fmt: skip
pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(600)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: ", ".join(shape) or "shards")
def test_two_gpus_are_one(shape: dict[str, Any], machine: Machine, tmp_path: Path) -> None:
    a_model().save_pretrained(tmp_path / "start")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.trainer.shapes_program", str(tmp_path), json.dumps({"shape": {"ranks": 2, **shape}})]
    done = subprocess.run([*command, machine.device.type], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-5000:]
