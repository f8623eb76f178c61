"""What is vLLM's alone: its death, its silence, its options."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from huggingface_hub import constants
from transformers import Qwen3MoeConfig

from penstock.services.modeling.head import compute_head_in
from penstock.services.modeling.precision import LOGPROBS
from penstock.services.modeling.whole_weights import A, B
from penstock.services.rollout.config import SamplingConfig, VllmEngineConfig
from penstock.services.rollout.engines import asynchronous
from penstock.services.rollout.engines.base import Completion, EngineError, Refusal, RequestError
from penstock.services.rollout.engines.vllm import names
from penstock.services.rollout.engines.vllm.arguments import engine_arguments
from penstock.services.runtime.errors import LibraryError, SetupError
from tests.engines.test_conformance import check
from tests.engines.workbench import CLOSE, Workbench, make_models

pytestmark = pytest.mark.vllm
EAGER = {"enforce_eager": True}
OPTIONS = {"type": "vllm", "max_length": 128, "max_sequences": 8, "deadline_s": 4, "vllm": EAGER}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    """For tests that leave the engine alive."""
    folder = tmp_path_factory.mktemp("model")
    bench = Workbench(folder, make_models(folder), {**OPTIONS, "vllm": {**EAGER, "block_size": 32}}, SamplingConfig())
    bench.publish(0)
    yield bench
    bench.engine.close()


@pytest.fixture
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    folder = tmp_path_factory.mktemp("model")
    bench = Workbench(folder, make_models(folder), OPTIONS, SamplingConfig())
    bench.publish(0)
    yield bench
    bench.engine.close()


def core(bench: Workbench) -> psutil.Process:
    (found,) = [p for p in bench.engine._processes if "EngineCore" in p.name()]
    return found


def test_the_names_of_its_arguments_are_read_as_it_has_them() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name for field in fields(AsyncEngineArgs)}
    assert names.installed() == known and known.isdisjoint(names.OTHERS)


def test_what_vllm_itself_refuses_costs_its_request_alone(bench: Workbench) -> None:
    random = np.random.default_rng(0)
    refused, fine = bench.request(random, n=1, top_p=0.0), bench.request(random, n=1)
    for request in (refused, fine):
        bench.engine.submit(request)
    found = {result.number: result for result in bench.step_until(lambda: not bench.engine.pending())}
    assert isinstance(found[refused.number], Refusal) and "top_p" in found[refused.number].reason
    assert isinstance(found[fine.number], Completion)


def test_an_evaluation_is_drawn_at_any_temperature(bench: Workbench) -> None:
    """Nobody reads its log-probabilities, which would be those before temperature and truncation."""
    random = np.random.default_rng(0)
    asked = bench.request(random, n=4, temperature=0.6, top_p=0.95, top_k=7)
    with pytest.raises(RequestError, match="this engine was started for temperature 1"):
        bench.engine.submit(asked)
    answers = bench.run(replace(asked, unread=True))
    assert len(answers) == 4 and all(np.isfinite(each.logprobs).all() and len(each.tokens) for each in answers)


def test_a_version_that_comes_again_with_other_weights_takes_no_keys_of_the_first(bench: Workbench) -> None:
    """As a step does that is redone after a crash."""
    random = np.random.default_rng(0)
    prompt = random.integers(2, bench.vocabulary, 64).astype(np.int32)  # two blocks of the cache
    for which in (0, 1):
        bench.publish(which)
        for completion in bench.run(bench.request(random, prompt, max_new_tokens=5)):
            check(bench, prompt, completion)
        bench.version -= 1


@pytest.mark.parametrize("sign", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_dead_or_silent_engine_core_is_noticed_and_named(
    mortal: Workbench, sign: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while nothing is asked of it; and one that loads a version may take as long as its bytes do."""
    process, told = core(mortal), mortal.engine._config
    with monkeypatch.context() as slow:
        slow.setattr(asynchronous, "LOAD_BYTES_S", 1e5)
        slow.setattr(mortal.engine, "_config", told.model_copy(update={"deadline_s": 0.001}))
        mortal.publish(1)
        mortal.engine._deadline_s = told.deadline_s  # or its watch would not wait, either
    os.kill(process.pid, sign)
    started = time.monotonic()
    with pytest.raises(EngineError, match=rf"vLLM failed.*{process.pid}"):
        while time.monotonic() - started < 30:
            mortal.engine.gauges()
            time.sleep(0.1)
    assert time.monotonic() - started < 10  # a quarter of the deadline until it is asked, the deadline to answer
    with pytest.raises(EngineError):
        mortal.publish(1)
    mortal.engine.close()
    assert not psutil.pid_exists(process.pid) or process.status() == psutil.STATUS_ZOMBIE


def test_what_drafts_tokens_is_read_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not random, as what comes by the weight channel is at first; the model's files are in the hub's cache."""
    revision = "ab" * 20  # of a whole one that is in the cache the hub is not asked
    make_models(tmp_path / "models--me--model" / "snapshots" / revision)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for drafts, read in (({"model": "small"}, "auto"), ({"method": "mtp"}, "auto"), ({"method": "ngram"}, None)):
        config = VllmEngineConfig(vllm={"speculative_config": {"num_speculative_tokens": 2, **drafts}})
        found = engine_arguments(config, f"me/model@{revision}", "float32", True, 1, 100, 0)
        assert (found.model, found.revision) == ("me/model", revision)
        assert found.speculative_config.get("draft_load_config", {}).get("load_format") == read, drafts
        assert found.load_format == ("auto" if "method" not in drafts else "dummy"), "as GPUs load a draft model"


@pytest.mark.slow
def test_a_request_that_a_live_core_has_lost_ends_the_engine(tmp_path: Path) -> None:
    """Nobody would ever answer it."""
    bench = Workbench(tmp_path, make_models(tmp_path), {**OPTIONS, "deadline_s": 2}, SamplingConfig())
    bench.publish(0)
    engine = bench.engine
    engine.submit(bench.request(np.random.default_rng(0), n=1, max_new_tokens=90))
    while not engine.gauges()["generated_tokens"]:
        engine.step()
    (lost,) = engine.llm.output_processor.request_states
    engine.call(engine.llm.engine_core.abort_requests_async([lost]), 10, "lose it")
    begun = time.monotonic()
    with pytest.raises(EngineError, match=r"no token for \d+ s, though its core answers and 1 requests wait \(rollout"):
        while time.monotonic() < begun + 30:
            engine.step()
    assert 9 < time.monotonic() - begun < 20
    engine.close()


@pytest.mark.slow
def test_wrong_options_are_errors_that_name_the_key(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("model")
    models = make_models(folder)
    for options, message in (
        ({"tensor_paralel_size": 2}, "tensor_paralel_size: .* did you mean 'tensor_parallel_size'"),
        ({"enable_chunked_prefill": True}, "only with seeded: false"),
        ({"quantization": "no-such-method"}, "rollout.engine.vllm: "),
    ):
        with pytest.raises(SetupError, match=message):
            Workbench(folder, models, {**OPTIONS, "vllm": options}, SamplingConfig())


@pytest.mark.slow
def test_capacity_follows_what_the_cache_has_room_for(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("model")
    small = {**OPTIONS, "max_sequences": 64, "deadline_s": 60}
    small["vllm"] = {"enforce_eager": True, "kv_cache_memory_bytes": 2 << 20}  # 1,024 tokens of 2 KiB
    bench = Workbench(folder, make_models(folder), small, SamplingConfig())
    bench.publish(0)
    assert bench.engine.capacity == 64
    random = np.random.default_rng(0)
    requests = [bench.request(random, n=1, max_new_tokens=80) for _ in range(64)]
    for request in requests:
        bench.engine.submit(request)
    seen = []
    while bench.engine.pending():
        bench.engine.step()
        seen.append(bench.engine.capacity)
    assert 1 <= min(seen) < 40
    bench.engine.close()


def check_tokens(bench: Workbench, version: int, random: np.random.Generator) -> None:
    """What is sampled now has transformers' log-probabilities under ``version``."""
    requests = {request.number: request for request in (bench.request(random) for _ in range(4))}
    for completion in bench.run(*requests.values()):
        wanted = bench.expected(requests[completion.number].tokens, completion, version)
        np.testing.assert_allclose(completion.logprobs, wanted, atol=CLOSE)


@pytest.mark.slow
def test_the_head_is_fp32_beside_a_model_in_bf16_and_follows_each_version(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("model")
    models = [model.to(torch.bfloat16) for model in make_models(folder)]
    for model in models:
        compute_head_in(model, "float32")
    patient = {**OPTIONS, "deadline_s": 60}  # what it compiles for bf16 at first takes a while
    bench = Workbench(folder, models, patient, SamplingConfig(), dtype="bfloat16", head_dtype="float32")
    random = np.random.default_rng(0)
    try:
        assert bench.engine.llm.vllm_config.model_config.head_dtype == torch.float32
        for which in (0, 1, 0):
            version = bench.publish(which)
            request = bench.request(random, n=4, max_new_tokens=60)
            off = [
                np.abs(each.logprobs - bench.expected(request.tokens, each, version)).mean()
                for each in bench.run(request)
            ]
            assert np.mean(off) <= LOGPROBS["bfloat16"]
    finally:
        bench.engine.close()


@pytest.mark.slow
def test_experts_are_swapped_and_their_tokens_are_transformers(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("mixture")
    mixture = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    bench = Workbench(folder, make_models(folder, Qwen3MoeConfig, **mixture), OPTIONS, SamplingConfig())
    random = np.random.default_rng(0)
    try:
        for which in (0, 1, 0):
            version = bench.publish(which)
            check_tokens(bench, version, random)
    finally:
        bench.engine.close()


def an_adapter(model: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    """Which ``model`` has merged then. Not of all that vLLM fuses."""
    torch.manual_seed(seed)
    adapter = {}
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            a, b = torch.randn(4, parameter.shape[1]) * 0.3, torch.randn(parameter.shape[0], 4) * 0.3
            adapter |= {name.replace(".weight", A): a, name.replace(".weight", B): b}
            parameter.data += b @ a
    return adapter


def test_an_adapter_lies_beside_the_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    """vLLM's own LoRA: each version's in the place of the one before, also for what is running."""
    folder = tmp_path_factory.mktemp("beside")
    models = [*make_models(folder), *make_models(tmp_path_factory.mktemp("another"))]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    adapters = [an_adapter(model, seed) for seed, model in enumerate(models[1:3])]
    options = {**OPTIONS, "adapter": "beside", "deadline_s": 30, "kv_on_update": "recompute"}
    bench = Workbench(folder, models, options, SamplingConfig(), adapter_rank=4)
    random = np.random.default_rng(0)
    try:
        for which in (0, 1, 0):
            version = bench.serve(adapters[which], models[1 + which])
            check_tokens(bench, version, random)
        first, request = bench.version, bench.request(random, n=2, max_new_tokens=60)
        bench.engine.submit(request)
        before = bench.generated()
        done = bench.step_until(lambda: bench.generated() >= before + 20)
        bench.serve(adapters[1], models[2])
        done += bench.drain()
        assert {int(v) for c in done for v in c.versions} == {first, first + 1}
        for completion in done:
            check(bench, request.tokens, completion)
        with pytest.raises(EngineError, match="is a whole model"):
            bench.publish(0)
    finally:
        bench.engine.close()


def test_an_adapter_that_comes_alone_is_merged_by_the_workers(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("adapted")
    models = make_models(folder)
    models[1].load_state_dict(models[0].state_dict())
    adapter = an_adapter(models[1])
    bench = Workbench(folder, models, {**OPTIONS, "deadline_s": 30}, SamplingConfig())
    random = np.random.default_rng(0)
    try:
        for alone in (False, True, False):
            version = bench.serve(adapter, models[1]) if alone else bench.publish(0)
            check_tokens(bench, version, random)
    finally:
        bench.engine.close()


@pytest.mark.slow
def test_what_it_could_not_start_for_is_told_in_its_own_words(tmp_path: Path) -> None:
    """They are in its processes' output alone."""
    options = OPTIONS | {"vllm": {"enforce_eager": True, "kv_cache_memory_bytes": 1}}
    with pytest.raises(LibraryError, match=r"vLLM could not start: ValueError: No available memory for the cache"):
        Workbench(tmp_path, make_models(tmp_path), options, SamplingConfig())
