"""All experts of a layer at once, as vLLM would have loaded them one by one."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from penstock.services.modeling.experts import as_in_files
from penstock.services.modeling.version_weights import version_of
from penstock.services.rollout.config import SamplingConfig
from tests.engines.workbench import Workbench, make_models

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


def compared(folder: str, worker: Any) -> tuple[list[str], int]:
    """In one of vLLM's workers: which of its parameters another version fills otherwise, and how many of them whole
    layers have filled."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    from penstock.services.rollout.engines.vllm.expert_layers import load_whole_layers

    runner = worker.model_runner
    model, config = runner.get_model(), AutoConfig.from_pretrained(folder)
    versions = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        versions.append(version_of(AutoModelForCausalLM.from_config(config)))

    def filled(weights: Any) -> dict[str, torch.Tensor]:
        initialize_layerwise_reload(model)
        model.load_weights(weights())
        finalize_layerwise_reload(model, runner.model_config)
        return {name: parameter.data.clone() for name, parameter in model.named_parameters()}

    number = 0

    def at_once() -> Any:
        nonlocal number
        rest, whole = load_whole_layers(model, config.model_type, versions[0])
        number = len(whole)
        return as_in_files(config.model_type, rest)

    wanted = filled(lambda: as_in_files(config.model_type, versions[0]))
    other = filled(lambda: as_in_files(config.model_type, versions[1]))
    assert not torch.equal(wanted[name := next(iter(wanted))], other[name])
    found = filled(at_once)
    return [name for name, parameter in wanted.items() if not torch.equal(parameter, found[name])], number


@pytest.mark.parametrize(
    "more",
    [{}, {"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}],
    ids=["one", "tensor", "expert"],
)
def test_they_are_what_vllms_own_loader_makes_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for a function of this test's own
    models = make_models(tmp_path, Qwen3MoeConfig, **MIXTURE)
    options = {"type": "vllm", "max_length": 128, "max_sequences": 8, "vllm": {"enforce_eager": True, **more}}
    bench = Workbench(tmp_path, models, options, SamplingConfig())
    try:
        engine: Any = bench.engine
        asked = engine.llm.collective_rpc(functools.partial(compared, str(tmp_path)))
        answers = asyncio.run_coroutine_threadsafe(asked, engine._loop).result(120)
    finally:
        bench.engine.close()
    layers = models[0].config.num_hidden_layers
    assert answers == [([], 2 * layers)] * more.get("tensor_parallel_size", 1)
