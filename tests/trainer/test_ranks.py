"""A trainer of two ranks is the trainer of one: same steps, same versions, bucket by bucket."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from penstock.pipeline.harness.fake_broker import FakeBroker
from penstock.protocols.cut import rows_of
from penstock.services.rollout.config import TorchEngineConfig
from penstock.services.rollout.engines.torch.engine import TorchEngine
from penstock.services.weights.config import WeightsConfig
from penstock.services.weights.transports import cuda_ipc
from tests.e2e.runs import ROOT, SHORT, Run, check_promises
from tests.trainer.rank_program import SHAPES, VERSIONS, a_model, tokens
from tests.weights.channel import Rollout, until


@pytest.mark.slow
@pytest.mark.parametrize("shape", [s if s == "apart" else pytest.param(s, marks=pytest.mark.chaos) for s in SHAPES])
def test_two_ranks_train_as_one_and_publish_to_three_rollouts(
    tmp_path: Path, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rollout is on the second rank's GPU, as both say."""
    monkeypatch.setattr(cuda_ipc, "gpu_of", lambda device: "GPU-1@here")
    a_model().save_pretrained(tmp_path / "start")
    broker = FakeBroker()
    rollouts: list[Rollout] = []
    found: dict[tuple[str, int], np.ndarray] = {}

    class Engine(TorchEngine):
        """Keeps the logits of each version that it was given."""

        def __init__(self, name: str) -> None:
            super().__init__(TorchEngineConfig(max_length=32), a_model().config, "float32", {1}, str)
            self._name = name

        def prepare(self, weights: Any, memory: Any = None) -> Any:
            with torch.inference_mode():
                logits = self._model.logits(super().prepare(weights), tokens()[0])
            found[self._name, len([key for key in found if key[0] == self._name]) + 1] = logits.numpy()
            return weights

    for index, transport in enumerate(("auto", "gloo", "snapshot")):
        config = WeightsConfig.model_validate({"transport": transport, "deadline_s": 20})
        name = f"rollout-{index}#1"
        rollouts.append(Rollout(broker.address, name, config, Engine(name)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.trainer.rank_program", broker.address, str(tmp_path), shape]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        until(lambda: process.poll() is not None or all(VERSIONS in r.served for r in rollouts), 120, "all versions")
        (tmp_path / "seen").touch()
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, output[-4000:]
    assert rollouts[0].loaded[VERSIONS].transport == "shm", "NCCL takes a GPU once"
    for rollout in rollouts:
        for place, version in enumerate(sorted(rollout.served), 1):
            wanted = np.load(tmp_path / f"logits-{version}.npy")
            np.testing.assert_allclose(found[rollout.name, place], wanted, rtol=0, atol=1e-5)
        assert VERSIONS in rollout.served
        rollout.close()
    broker.close()
    (saved,) = (tmp_path / "checkpoints").iterdir()
    if (saved / "adapter_config.json").exists():
        model = PeftModel.from_pretrained(a_model(), saved)
    else:
        model = AutoModelForCausalLM.from_pretrained(saved)
        assert type(model).__name__ == "Qwen3ForCausalLM"
    with torch.no_grad():
        logits = model(tokens()).logits[0].numpy()
    np.testing.assert_allclose(logits, np.load(tmp_path / f"logits-{VERSIONS}.npy"), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("rows", "size"), [(8, 2), (7, 2), (1, 2), (5, 4), (3, 8), (0, 2)])
def test_rows_are_cut_as_torch_cuts_them(rows: int, size: int) -> None:
    wanted = [len(part) for part in torch.arange(rows).chunk(size)] if rows else []
    cut = [rows_of(rows, rank, size) for rank in range(size)]
    assert [count for _, count in cut if count] == [count for count in wanted if count]
    assert sum(count for _, count in cut) == rows


@pytest.mark.chaos
def test_a_run_with_two_ranks_and_three_rollouts(tmp_path: Path) -> None:
    run = Run(tmp_path, [*SHORT, "trainer.ranks=2", "rollout.count=3", "trainer.checkpoint.every=3"])
    summary = run.wait()
    check_promises(summary)
    assert summary["steps"] == 6
