"""A critic that is cut over ranks learns what one process learns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import seeing
from tests.e2e.runs import ROOT
from tests.trainer.rank_program import a_model


@pytest.mark.parametrize("family", [None, pytest.param("qwen3_vl", marks=pytest.mark.chaos)], ids=["words", "pictures"])
def test_two_ranks_give_the_values_and_learn_the_steps_of_one(family: str | None, tmp_path: Path) -> None:
    """As shards, and as a pipeline's stages; of one that sees, with tensors and rows shared; also from a checkpoint of
    two, by one and by two."""
    if family:
        seeing.write(family, tmp_path / "policy")
    else:
        a_model().save_pretrained(tmp_path / "policy")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += [
        "--rdzv-endpoint=127.0.0.1:0",
        "-m",
        "tests.critic.rank_program",
        str(tmp_path),
        *(["shows"] if family else []),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
