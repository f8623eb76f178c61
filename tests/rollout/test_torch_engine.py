"""The embedded engine against transformers."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from penstock.pipeline.bench.fake_memory import ROUND, Memory
from penstock.protocols.experience import Sampling
from penstock.services.modeling.head import compute_head_in
from penstock.services.modeling.load import attention_of, with_head
from penstock.services.modeling.precision import LOGPROBS
from penstock.services.rollout.config import TorchEngineConfig
from penstock.services.rollout.engines.base import Completion, Engine, Request, RequestError
from penstock.services.rollout.engines.torch import engine as engine_module
from penstock.services.rollout.engines.torch import transformers_model
from penstock.services.rollout.engines.torch.engine import TorchEngine
from penstock.services.rollout.engines.torch.hosted import HostedModel
from penstock.services.rollout.engines.torch.hybrid import HybridModel
from penstock.services.rollout.engines.torch.native import NativeModel
from penstock.services.rollout.engines.torch.recomputed import RecomputedModel
from penstock.services.rollout.engines.torch.sampling import sample
from penstock.services.weights.layout import make_layout, view_weights
from tests import families
from tests.conftest import TINY

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "qwen3": Qwen3Config(**TINY, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**{k: v for k, v in TINY.items() if k != "head_dim"}, tie_word_embeddings=False),
    "llama": LlamaConfig(**TINY, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3_ROPE),
    "gemma2": Gemma2Config(**TINY, sliding_window=8, query_pre_attn_scalar=16),
    "gemma3": Gemma3TextConfig(**TINY, sliding_window=8, query_pre_attn_scalar=16),
    "mistral": MistralConfig(**TINY, sliding_window=8),
    "phi3": Phi3Config(**{k: v for k, v in TINY.items() if k != "head_dim"}, sliding_window=None),
    "mamba": MambaConfig(vocab_size=51, hidden_size=32, state_size=8, num_hidden_layers=2, pad_token_id=0),
    "gpt2": GPT2Config(vocab_size=51, n_embd=64, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=1),
}
HYBRID = ("qwen3_5_text", "qwen3_5", "lfm2", "granitemoehybrid", "falcon_h1", "nemotron_h")
CONFIGS |= {family: families.config_of(family) for family in HYBRID}


def make(family: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = CONFIGS[family]
    model = with_head(config, "language").from_config(config, attn_implementation=attention_of(config)).eval()
    for parameter in model.parameters():  # biases and norms away from 0 and 1, so that a missing one shows
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.15)
    return model


def engine_for(model: Any, stop_ids: set[int] | None = None, **options: Any) -> TorchEngine:
    config = TorchEngineConfig(**{"max_sequences": 16, "max_length": 64, **options})
    engine = TorchEngine(
        config, model.config, "float32", stop_ids or set(), lambda ids: "".join(chr(96 + i % 26) for i in ids)
    )
    engine.swap(engine.prepare(dict(model.named_parameters())), 0)
    return engine


def requests(count: int, n: int = 2, seed: int = 0, **sampling: Any) -> list[Request]:
    random = np.random.default_rng(seed)
    return [
        Request(
            i, 7, random.integers(2, 51, random.integers(1, 20)).astype(np.int32),
            Sampling(**{"n": n, "max_new_tokens": int(random.integers(1, 20)), **sampling}),
        )
        for i in range(count)
    ]  # fmt: skip


def drain(engine: TorchEngine) -> list[Completion]:
    done = []
    while engine.pending():
        done += engine.step()
    return sorted(done, key=lambda c: (c.number, c.sample))


def expected_logprobs(model: Any, prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
    with torch.no_grad():
        logs = model(ids).logits[0].float().log_softmax(-1)
    return logs[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None]).squeeze(-1).numpy()


@pytest.mark.parametrize("family", CONFIGS)
def test_logprobs_are_those_of_transformers(family: str) -> None:
    model = make(family)
    engine = engine_for(model)
    kinds = {"qwen2": NativeModel, "qwen3": NativeModel, "llama": NativeModel, "mamba": RecomputedModel}
    kinds |= dict.fromkeys(HYBRID, HybridModel)
    assert type(engine._model) is kinds.get(family, HostedModel)
    atol = 5e-4 if family in HYBRID else 1e-4  # a state's sums are taken in another order, token by token
    asked = requests(12, n=3)
    for request in asked:
        engine.submit(request)
    done = drain(engine)
    assert len(done) == 36
    for completion in done:
        request = asked[completion.number]
        assert len(completion.tokens) == request.sampling.max_new_tokens and completion.finish == "length"
        np.testing.assert_allclose(
            completion.logprobs, expected_logprobs(model, request.tokens, completion.tokens), atol=atol
        )


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "gemma2", "gpt2", "mamba", "qwen3_5"])
def test_in_bf16_logits_are_fp32_where_the_head_is(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way to run a model: natively, hosted, with a soft cap, recomputed; when it prefills, decodes and scores."""
    model = make(family).to(torch.bfloat16)
    options, weights = TorchEngineConfig(max_sequences=16, max_length=64), dict(model.named_parameters())
    made: list[torch.Tensor] = []
    monkeypatch.setattr(engine_module, "sample", lambda *given: made.append(given[0]) or sample(*given))

    def rounded(logits: torch.Tensor) -> float:
        return float((logits.bfloat16().float() == logits).float().mean())

    for head in (None, "float32"):
        config = deepcopy(model.config)  # transformers notes the dtype there, and other tests have the same one
        engine = TorchEngine(options, config, "bfloat16", set(), lambda ids: "", head)
        compute_head_in(model, head)
        prepared = engine.prepare(weights)
        engine.swap(prepared, 0)
        made.clear()
        asked = requests(4, max_new_tokens=6)
        for request in asked:
            engine.submit(request)
        for done in drain(engine):
            wanted = expected_logprobs(model, asked[done.number].tokens, done.tokens)
            assert np.abs(done.logprobs - wanted).mean() <= LOGPROBS["bfloat16"]
        made.append(engine._model.logits(prepared, torch.arange(2, 12)))
        assert len(made) == 7 and all(logits.dtype == torch.float32 for logits in made)
        assert all(rounded(logits) < 0.05 if head else rounded(logits) == 1.0 for logits in made)


def test_sequences_are_as_long_as_their_positions_do_not_depend_on_who_is_beside_them() -> None:
    """Of Phi-3's long contexts: all keys of a batch would be others with one sequence beyond what was learned."""
    factors = [[float(each) for each in range(first, first + 8)] for first in (1, 3)]
    rope = {"rope_type": "longrope", "short_factor": factors[0], "long_factor": factors[1]}
    given = {name: value for name, value in TINY.items() if name not in ("head_dim", "max_position_embeddings")}
    config = Phi3Config(
        **given, sliding_window=None, max_position_embeddings=64, original_max_position_embeddings=16,
        rope_parameters=rope,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    engine = engine_for(model)
    with pytest.raises(RequestError, match=r"exceed rollout\.engine\.max_length=16"):
        engine.submit(Request(0, 7, np.arange(2, 12, dtype=np.int32), Sampling(max_new_tokens=8)))
    asked = [Request(i, 7, np.arange(2, 4 + i, dtype=np.int32), Sampling(max_new_tokens=12 - i)) for i in range(3)]
    for request in asked:
        engine.submit(request)
    for completion in drain(engine):
        wanted = expected_logprobs(model, asked[completion.number].tokens, completion.tokens)
        np.testing.assert_allclose(completion.logprobs, wanted, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gemma3", "mamba", "qwen3_5"])
def test_any_kind_of_model_sleeps_and_goes_on(family: str) -> None:
    model = make(family)
    engine = engine_for(model)
    asked = requests(4, n=2, max_new_tokens=12)
    for request in asked:
        engine.submit(request)
    done = [each for _ in range(5) for each in engine.step() if isinstance(each, Completion)]
    engine.sleep()
    engine.wake()
    engine.swap(engine.prepare(dict(model.named_parameters())), 1)
    done += drain(engine)
    assert len(done) == 8
    for completion in done:
        wanted = expected_logprobs(model, asked[completion.number].tokens, completion.tokens)
        np.testing.assert_allclose(completion.logprobs, wanted, atol=1e-4)


@pytest.mark.parametrize("told", [True, False])
def test_a_prefill_has_logits_of_last_tokens_alone(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all they would be gigabytes where the vocabulary is large."""
    model = make("gpt2")
    engine = engine_for(model, max_sequences=8)
    hosted = engine._model
    assert isinstance(hosted, HostedModel) and hosted._told
    hosted._told = told
    monkeypatch.setattr(transformers_model, "LOGIT_BYTES", 4 * 51 * 20)
    made: list[int] = []
    for copy in hosted._spare:
        copy.lm_head.register_forward_hook(lambda _module, _given, found: made.append(found.numel() // 51))
    asked = requests(8, n=1, max_new_tokens=2)
    for request in asked:
        engine.submit(request)
    done = drain(engine)
    assert max(made) <= (8 * 3 if told else 20)
    for completion in done:
        wanted = expected_logprobs(model, asked[completion.number].tokens, completion.tokens)
        np.testing.assert_allclose(completion.logprobs, wanted, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_native_logits_are_within_1e_4_of_transformers(family: str) -> None:
    model = make(family)
    engine = engine_for(model)
    tokens = torch.randint(2, 51, (3, 17))
    slots = [torch.tensor([i]) for i in range(3)]
    with torch.inference_mode():
        engine._model.weights = engine.prepare(dict(model.named_parameters()))
        first = engine._model.prefill(tokens[:, :-1], torch.full((3,), 16), slots)
        second = engine._model.decode(tokens[:, -1], torch.full((3,), 16), 17)
        wanted = model(tokens).logits
    torch.testing.assert_close(first, wanted[:, -2], atol=1e-4, rtol=0)
    torch.testing.assert_close(second, wanted[:, -1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_a_version_is_on_the_device_once_while_it_is_prepared(family: str) -> None:
    """Another dtype stands for a GPU: there, too, each tensor is copied out of the staging buffer."""
    model = make(family)
    layout = make_layout({name: tuple(p.shape) for name, p in model.named_parameters()}, "float32")
    staged = torch.zeros(layout.nbytes, dtype=torch.uint8)
    named = view_weights(layout, staged)
    native = NativeModel(model.config, 1, 16, torch.bfloat16, torch.device("cpu"))
    with Memory() as memory:
        staged.view(-1)  # it is seen, so that views of it count as nothing
        before = memory.now
        prepared = native.prepare(named)
    assert len(prepared.layers) == model.config.num_hidden_layers
    assert memory.peak - before <= sum(-(-2 * p.numel() // ROUND) * ROUND for p in model.parameters())


def test_greedy_is_transformers_greedy() -> None:
    model = make("qwen3")
    engine = engine_for(model)
    asked = requests(8, n=1, temperature=0.0)
    for request in asked:
        engine.submit(request)
    for completion in drain(engine):
        request = asked[completion.number]
        wanted = model.generate(
            torch.from_numpy(request.tokens.astype(np.int64))[None], do_sample=False, eos_token_id=None,
            max_new_tokens=request.sampling.max_new_tokens,
        )  # fmt: skip
        assert completion.tokens.tolist() == wanted[0, len(request.tokens) :].tolist()


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch() -> None:
    model = make("qwen3")
    crowded, alone = engine_for(model), engine_for(model)
    asked = requests(10)
    for request in asked:
        crowded.submit(request)
    together = {(c.number, c.sample): c.tokens.tolist() for c in drain(crowded)}
    alone.submit(asked[4])
    for completion in drain(alone):
        assert together[(4, completion.sample)] == completion.tokens.tolist()
    assert together[(4, 0)] != together[(4, 1)]


def test_the_sampled_distribution_is_the_models() -> None:
    model = make("qwen3")
    engine = engine_for(model, max_sequences=256)
    prompt = np.array([5, 6, 7], np.int32)
    counts = np.zeros(51)
    for number in range(16):
        engine.submit(Request(number, 3, prompt, Sampling(n=256, max_new_tokens=1, temperature=2.0)))
    for completion in drain(engine):
        counts[completion.tokens[0]] += 1
    with torch.no_grad():
        wanted = (model(torch.tensor([[5, 6, 7]])).logits[0, -1] / 2.0).softmax(-1).numpy()
    assert np.abs(counts / counts.sum() - wanted).sum() < 0.1


def test_truncation_keeps_to_the_nucleus() -> None:
    model = make("qwen3")
    engine = engine_for(model)
    prompt = np.array([5, 6, 7], np.int32)
    with torch.no_grad():
        order = model(torch.tensor([[5, 6, 7]])).logits[0, -1].argsort(descending=True).tolist()
    for number in range(20):
        engine.submit(Request(number, 1, prompt, Sampling(n=8, max_new_tokens=1, top_k=3, temperature=5.0)))
    assert {int(c.tokens[0]) for c in drain(engine)} == set(order[:3])
    for number in range(5):
        engine.submit(Request(number, 1, prompt, Sampling(n=8, max_new_tokens=1, top_p=1e-6, temperature=5.0)))
    assert {int(c.tokens[0]) for c in drain(engine)} == {order[0]}


def test_stop_ids_and_stop_texts_end_a_sequence() -> None:
    model = make("qwen3")
    engine = engine_for(model, stop_ids={9, 10, 11, 12})
    asked = requests(20, max_new_tokens=30)
    for request in asked:
        engine.submit(request)
    done = drain(engine)
    stopped = [c for c in done if c.finish == "stop"]
    assert stopped and all(c.tokens[-1] in (9, 10, 11, 12) for c in stopped)
    assert all(not np.isin(c.tokens[:-1], [9, 10, 11, 12]).any() for c in done)
    plain = engine_for(model)
    plain.submit(Request(0, 1, asked[0].tokens, Sampling(n=8, max_new_tokens=40, stop=("a", "b", "c"))))
    for completion in drain(plain):
        letters = [chr(96 + int(i) % 26) for i in completion.tokens]
        assert not set(letters[:-1]) & {"a", "b", "c"}
        assert (letters[-1] in "abc") == (completion.finish == "stop")


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "qwen3_5"])
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_weights_are_replaced_in_flight_and_the_boundary_is_exact(family: str, kv: str) -> None:
    old, new = make(family, 0), make(family, 1)
    engine = engine_for(old, kv_on_update=kv)
    asked = requests(5, n=3, max_new_tokens=12)
    for request in asked:
        engine.submit(request)
    done = []
    for _ in range(5):
        done += engine.step()
    engine.swap(engine.prepare(dict(new.named_parameters())), 1)
    done += drain(engine)
    mixed = [c for c in done if len(set(c.versions.tolist())) == 2]
    assert len(mixed) == 15
    for completion in mixed:
        # The prefill and five decoding steps ran under the old weights: six tokens.
        assert completion.versions.tolist() == [0] * 6 + [1] * 6
        prompt = asked[completion.number].tokens
        before = expected_logprobs(old, prompt, completion.tokens)
        np.testing.assert_allclose(completion.logprobs[:6], before[:6], atol=1e-4)
        after = expected_logprobs(new, prompt, completion.tokens)
        agrees = np.abs(completion.logprobs[6:] - after[6:]).max() < 1e-4
        assert agrees == (kv == "recompute")


def test_requests_that_never_fit_are_refused() -> None:
    engine = engine_for(make("qwen3"))
    for request, match in [
        (
            Request(0, 0, np.arange(2, 50, dtype=np.int32), Sampling(max_new_tokens=30)),
            "exceed rollout.engine.max_length=64",
        ),
        (Request(0, 0, np.array([99], np.int32), Sampling()), "outside the vocabulary"),
        (Request(0, 0, np.array([], np.int32), Sampling()), "0 tokens"),
        (Request(0, 0, np.array([3], np.int32), Sampling(n=17)), "n=17 exceeds rollout.engine.max_sequences"),
    ]:
        with pytest.raises(RequestError, match=match):
            engine.submit(request)
    assert engine.pending() == 0


def test_a_thousand_requests_with_random_joins_and_aborts() -> None:
    random = np.random.default_rng(0)
    model = make("qwen3")
    engine = engine_for(model)
    asked = {r.number: r for r in requests(1000, n=2, seed=1)}
    queue, done, aborted = list(asked.values()), [], set()
    while queue or engine.pending():
        for _ in range(int(random.integers(0, 4))):
            if queue:
                engine.submit(queue.pop())
        if random.random() < 0.1:
            victim = int(random.integers(1000))
            if victim not in {r.number for r in queue}:
                engine.abort(victim)
                aborted.add(victim)
        done += engine.step()
    assert engine._active == 0 and not engine._queue and not engine._stops
    finished = {n for n in asked if sum(c.number == n for c in done) == 2}
    assert set(asked) - finished <= aborted
    for completion in random.choice(np.array(done, object), 60, replace=False):
        wanted = expected_logprobs(model, asked[completion.number].tokens, completion.tokens)
        np.testing.assert_allclose(completion.logprobs, wanted, atol=1e-4)


def test_it_is_an_engine() -> None:
    assert isinstance(engine_for(make("qwen3")), Engine)
