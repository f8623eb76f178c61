"""Engines that say which experts they have sent tokens to: those that transformers' own forward sends them to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig

from penstock.protocols.experience import Sampling
from penstock.protocols.routing import unknown
from penstock.services.modeling.load import load_config
from penstock.services.modeling.routing import Recorder
from penstock.services.modeling.version_weights import version_of
from penstock.services.rollout.config import SamplingConfig, TorchEngineConfig
from penstock.services.rollout.engines.base import Completion, Request, RequestError
from penstock.services.rollout.engines.torch.engine import TorchEngine
from penstock.services.runtime.errors import SetupError
from tests import families
from tests.engines.workbench import Workbench, make_models

MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
TORCH = {"type": "torch", "max_length": 128, "max_sequences": 6}


@pytest.fixture(scope="module")
def mixture(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("routed")
    models = make_models(folder, Qwen3MoeConfig, **MIXTURE)
    sampling = SamplingConfig(routing_replay=True)
    if options["type"] == "vllm" and not torch.cuda.is_available():
        with pytest.raises(SetupError, match="vLLM records no experts on a CPU"):
            Workbench(folder, models, options, sampling)
        pytest.skip("vLLM records no experts on a CPU")
    if options["type"] == "plugin":
        pytest.skip("the engine of --engine need not say where tokens went")
    bench = Workbench(folder, models, options if options["type"] == "vllm" else TORCH, sampling)
    bench.publish(0)
    yield bench
    bench.engine.close()


def chosen(model: Any, tokens: np.ndarray) -> np.ndarray:
    """``[tokens, layers, experts]`` of a plain forward pass, sorted."""
    with torch.no_grad(), Recorder(model).noting() as found:
        model(torch.from_numpy(tokens.astype(np.int64))[None])
    return np.sort(torch.stack(found, 1).numpy(), -1)


def check(model: Any, request: Request, completion: Completion) -> None:
    whole = np.concatenate([request.tokens, completion.tokens])
    routing = completion.routing
    assert routing.dtype == np.uint8 and routing.shape == (len(whole) - request.known, 2, 2)
    assert (routing[-1] == unknown(routing.dtype)).all()
    np.testing.assert_array_equal(np.sort(routing[:-1], -1), chosen(model, whole)[request.known : -1])


def test_tokens_went_where_transformers_sends_them(mixture: Workbench) -> None:
    random = np.random.default_rng(0)
    asked = [mixture.request(random, n=2, routing_replay=True, max_new_tokens=3 + 5 * i) for i in range(6)]
    asked += [replace(mixture.request(random, n=1, routing_replay=True), known=0), mixture.request(random, n=1)]
    asked += [replace(r, number=r.number + 100, known=len(r.tokens) - 1) for r in asked[:2]]
    asked_by_number = {request.number: request for request in asked}
    done = mixture.run(*asked)
    assert {c.number for c in done} == asked_by_number.keys()
    for completion in done:
        request = asked_by_number[completion.number]
        if request.sampling.routing_replay:
            check(mixture.models[0], request, completion)
        else:
            assert not completion.routing.size


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "gpt_oss", "deepseek_v3"])
def test_the_torch_engine_notes_it_of_other_families(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Some of their layers keep a state, and rows of one length alone are run together; some have no experts."""
    if options["type"] != "torch":
        pytest.skip("it is the torch engine's")
    made = families.write(family, tmp_path).eval()
    config, sampling = load_config(str(tmp_path)), Sampling(n=2, max_new_tokens=6, routing_replay=True)
    limits = TorchEngineConfig(max_sequences=16, max_length=64)
    engine = TorchEngine(limits, config, "float32", {1}, str, path=str(tmp_path))
    engine.swap(engine.prepare(version_of(made)), 0)
    random = np.random.default_rng(0)
    asked = [Request(n, n, random.integers(2, 64, size).astype(np.int32), sampling) for n, size in enumerate([9, 7, 9])]
    for request in asked:
        engine.submit(request)
    done: list[Completion] = []
    while engine.pending():
        done += engine.step()
    assert len(done) == 6
    for completion in done:
        whole = np.concatenate([asked[completion.number].tokens, completion.tokens])
        np.testing.assert_array_equal(np.sort(completion.routing[:-1], -1), chosen(made, whole)[:-1])
    engine.close()


def size_of(request: Request) -> int:
    return len(request.tokens)


def test_a_token_keeps_the_experts_that_it_was_sampled_with(mixture: Workbench) -> None:
    first = mixture.publish(0)
    request = mixture.request(np.random.default_rng(1), n=1, routing_replay=True, max_new_tokens=40)
    mixture.engine.submit(request)
    before = mixture.generated()
    done = mixture.step_until(lambda: mixture.generated() >= before + 8)
    second = mixture.publish(1)
    for known in (-1, size_of(request), 10**6):
        with pytest.raises(RequestError, match="called known"):
            mixture.engine.submit(replace(request, number=900, known=known))
    completion = (done + mixture.drain())[-1]
    whole, size = np.concatenate([request.tokens, completion.tokens]), len(request.tokens)
    old = int((completion.versions == first).sum())
    assert 0 < old < len(completion.tokens) and set(completion.versions) == {first, second}
    mine = np.sort(completion.routing[: size + old - 1], -1)
    np.testing.assert_array_equal(mine, chosen(mixture.models[0], whole)[: size + old - 1])
    mixture.publish(0)


def test_a_model_without_experts_is_refused(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    if options["type"] != "torch":
        pytest.skip("of the embedded engine")
    folder = tmp_path_factory.mktemp("plain")
    bench = Workbench(folder, make_models(folder), TORCH, SamplingConfig())
    with pytest.raises(RequestError, match="has no experts"):
        bench.engine.submit(bench.request(np.random.default_rng(0), routing_replay=True))
