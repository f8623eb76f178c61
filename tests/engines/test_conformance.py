"""What every engine must do. Runs against the torch engine, or the one of ``--engine``, a config section in YAML:

    pytest tests/engines --engine '{type: vllm, max_length: 128, max_sequences: 32, kv_on_update: recompute}'
    pytest tests/engines --engine '{type: plugin, name: "my_package.engine:MyEngine", options: {}}'

A server that an engine needs is started by the ``server`` command of the same section (`tests.engines.server`).
An engine that keeps the KV of requests in flight when the weights change fails the tests of exact boundaries; give it
whatever option makes it compute the KV anew.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.services.rollout.engines.base import Completion, Engine, RequestError
from tests.engines.workbench import CLOSE, LETTERS, Workbench


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


def check(bench: Workbench, prompt: np.ndarray, completion: Completion) -> None:
    """Every token's log-probability is that of the version that it claims."""
    for version in set(completion.versions.tolist()):
        mine = completion.versions == version
        expected = bench.expected(prompt, completion, version)
        np.testing.assert_allclose(completion.logprobs[mine], expected[mine], atol=CLOSE)


def test_it_is_an_engine(bench: Workbench) -> None:
    assert isinstance(bench.engine, Engine)
    assert bench.engine.capacity >= 1


def test_scores_are_transformers(bench: Workbench, random: np.random.Generator) -> None:
    for which in (1, 0, 1):
        model = bench.models[which]
        prepared = bench.engine.prepare(dict(model.named_parameters()))
        tokens = random.integers(2, bench.vocabulary, 50).astype(np.int32)
        version = bench.publish(which)
        found = bench.engine.score(prepared, tokens)
        assert found.dtype == np.float32
        whole = Completion(0, 0, tokens[1:], found, np.full(49, version, np.int32), "length")
        np.testing.assert_allclose(found, bench.expected(tokens[:1], whole, version), atol=CLOSE)


@pytest.mark.parametrize("sampling", [{}, {"top_k": 5}, {"top_p": 0.7}, {"temperature": 0.0}], ids=str)
def test_logprobs_are_transformers(bench: Workbench, random: np.random.Generator, sampling: dict[str, Any]) -> None:
    requests = {r.number: r for r in (bench.request(random, **sampling) for _ in range(12))}
    done = bench.run(*requests.values())
    assert [(c.number, c.sample) for c in done] == [(n, s) for n in requests for s in range(2)]
    for completion in done:
        assert completion.tokens.dtype == np.int32
        assert completion.logprobs.dtype == np.float32
        assert completion.versions.tolist() == [bench.version] * len(completion.tokens)
        check(bench, requests[completion.number].tokens, completion)


def test_greedy_takes_the_likeliest(bench: Workbench, random: np.random.Generator) -> None:
    import torch

    for completion in bench.run(*[request := bench.request(random, n=1, temperature=0.0)]):
        ids = torch.from_numpy(np.concatenate([request.tokens, completion.tokens]).astype(np.int64))[None]
        with torch.no_grad():
            best = bench.models[0](ids).logits[0, len(request.tokens) - 1 : -1].argmax(-1)
        assert completion.tokens.tolist() == best.tolist()


def test_truncation_keeps_to_the_nucleus(bench: Workbench) -> None:
    import torch

    prompt = np.array([5, 6, 7], np.int32)
    with torch.no_grad():
        order = bench.models[0](torch.tensor([[5, 6, 7]])).logits[0, -1].argsort(descending=True).tolist()
    some = np.random.default_rng()
    asked = [bench.request(some, prompt, n=8, max_new_tokens=1, top_k=3) for _ in range(10)]
    assert {int(c.tokens[0]) for c in bench.run(*asked)} <= set(order[:3])
    asked = [bench.request(some, prompt, n=8, max_new_tokens=1, top_p=1e-6) for _ in range(3)]
    assert {int(c.tokens[0]) for c in bench.run(*asked)} == {order[0]}


def test_seeds_decide_the_tokens(bench: Workbench, random: np.random.Generator) -> None:
    asked = [bench.request(random, n=3) for _ in range(8)]
    first, second = bench.run(*asked), bench.run(*asked)
    assert [c.tokens.tolist() for c in first] == [c.tokens.tolist() for c in second]
    samples = [c.tokens.tolist() for c in first[:3]]
    assert len({tuple(s) for s in samples}) == 3
    other = bench.run(*[type(r)(r.number, 8, r.tokens, r.sampling) for r in asked])
    assert [c.tokens.tolist() for c in first] != [c.tokens.tolist() for c in other]


def test_the_end_tokens_and_the_limit_end_a_sequence(bench: Workbench, random: np.random.Generator) -> None:
    requests = {r.number: r for r in (bench.request(random, n=8, max_new_tokens=60) for _ in range(16))}
    done = bench.run(*requests.values())
    stopped = [c for c in done if c.finish == "stop"]
    assert len(stopped) < len(done)
    assert {int(c.tokens[-1]) for c in stopped} == bench.stop_ids, "the model's, and rollout.sampling.stop_token_ids"
    for completion in done:
        ends = np.isin(completion.tokens, sorted(bench.stop_ids))
        assert not ends[:-1].any()
        assert ends[-1] == (completion.finish == "stop")
        assert completion.finish == "stop" or len(completion.tokens) == 60


def test_stop_texts_end_a_sequence(bench: Workbench, random: np.random.Generator) -> None:
    stops = tuple(LETTERS[:4])
    requests = [bench.request(random, n=8, max_new_tokens=60, stop=stops) for _ in range(6)]
    done = bench.run(*requests)
    assert any(c.finish == "stop" for c in done)
    for completion in done:
        text = bench.text.decode([completion.tokens.tolist()])[0]
        assert not set(text[:-1]) & set(stops)
        if completion.finish == "stop" and completion.tokens[-1] not in bench.stop_ids:
            assert text[-1] in stops


def test_a_request_has_stop_tokens_of_its_own(bench: Workbench, random: np.random.Generator) -> None:
    ends = frozenset(range(2, bench.vocabulary, 20))
    own = [replace(bench.request(random, n=8, max_new_tokens=60), stop_ids=ends) for _ in range(3)]
    others = [bench.request(random, n=8, max_new_tokens=60) for _ in range(3)]
    done = bench.run(*own, *others)
    theirs = [c for c in done if c.number > own[-1].number]
    assert any(np.isin(c.tokens[:-1], sorted(ends)).any() for c in theirs)
    mine = [c for c in done if c.number <= own[-1].number]
    assert any(c.finish == "stop" and c.tokens[-1] in ends for c in mine)
    for completion in mine:
        assert not np.isin(completion.tokens[:-1], sorted(ends | bench.stop_ids)).any()
        assert (completion.finish == "stop") == (completion.tokens[-1] in ends | bench.stop_ids)


def test_requests_that_never_fit_are_refused(bench: Workbench, random: np.random.Generator) -> None:
    long = random.integers(2, bench.vocabulary, 120).astype(np.int32)
    for tokens, message in ((long, "max_length"), (np.array([9999], np.int32), "vocabulary"), (long[:0], "0 tokens")):
        with pytest.raises(RequestError, match=message):
            bench.engine.submit(bench.request(random, tokens))
    with pytest.raises(RequestError, match="is empty"):
        bench.engine.submit(bench.request(random, stop=("a", "")))
    assert bench.engine.pending() == 0
    assert len(bench.run(bench.request(random))) == 2


def test_a_burst_of_long_prompts(bench: Workbench, random: np.random.Generator) -> None:
    """More prompt tokens at once than an engine prefills in one step."""
    prompts = [random.integers(2, bench.vocabulary, 100).astype(np.int32) for _ in range(120)]
    requests = {r.number: r for r in (bench.request(random, prompt, n=1, max_new_tokens=4) for prompt in prompts)}
    done = bench.run(*requests.values())
    assert len(done) == 120
    for completion in done[::10]:
        check(bench, requests[completion.number].tokens, completion)


def test_abort_forgets_a_request(bench: Workbench, random: np.random.Generator) -> None:
    gone, stays = (bench.request(random, max_new_tokens=60) for _ in range(2))
    bench.engine.submit(gone)
    bench.engine.submit(stays)
    assert bench.engine.pending() == 4
    start = bench.generated()
    done = bench.step_until(lambda: bench.generated() > start)
    bench.engine.abort(gone.number)
    assert bench.engine.pending() <= 2
    done += bench.drain()
    assert sorted((c.number, c.sample) for c in done if c.number == stays.number) == [
        (stays.number, 0),
        (stays.number, 1),
    ]
    again = bench.run(gone)  # a lease that is granted again
    assert [c.sample for c in again] == [0, 1]
    for completion in again:
        check(bench, gone.tokens, completion)


def test_versions_are_exact_at_the_token(
    bench: Workbench, options: dict[str, Any], random: np.random.Generator
) -> None:
    """Tokens before the boundary have the old weights' log-probabilities, those after it the new ones'."""
    for attempt in range(10):
        requests = {r.number: r for r in (bench.request(random, n=4, max_new_tokens=80) for _ in range(4))}
        for request in requests.values():
            bench.engine.submit(request)
        start = bench.generated()
        done = bench.step_until(lambda start=start: bench.generated() > start + 30)
        bench.publish((attempt + 1) % 2)
        done += bench.drain()
        mixed = [c for c in done if len(set(c.versions.tolist())) == 2]
        for completion in done:
            assert (np.diff(completion.versions) >= 0).all()
            check(bench, requests[completion.number].tokens, completion)
        if mixed:
            return
    assert options["type"] == "plugin", "no trajectory had two versions"
    pytest.skip("this engine changes no weights within a trajectory")


def test_a_prompt_seen_under_old_weights_is_computed_anew(bench: Workbench, random: np.random.Generator) -> None:
    prompt = random.integers(2, bench.vocabulary, 64).astype(np.int32)
    for which in (0, 1, 0):
        bench.publish(which)
        for completion in bench.run(*(bench.request(random, prompt, max_new_tokens=5) for _ in range(3))):
            check(bench, prompt, completion)


def test_weights_that_do_not_fit_are_refused(bench: Workbench, random: np.random.Generator) -> None:
    weights = dict(bench.models[1].named_parameters())
    del weights["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(Exception, match="k_proj"):
        bench.engine.prepare(weights)
    request = bench.request(random)
    for completion in bench.run(request):  # the version before still serves
        check(bench, request.tokens, completion)


def test_a_thousand_requests_with_joins_aborts_and_new_weights(bench: Workbench, random: np.random.Generator) -> None:
    asked = {
        r.number: r for r in (bench.request(random, max_new_tokens=int(random.integers(1, 16))) for _ in range(1000))
    }
    queue, done, aborted = list(asked.values()), [], set()
    deadline, published = time.monotonic() + 240, time.monotonic()
    while queue or bench.engine.pending():
        assert time.monotonic() < deadline
        while queue and bench.engine.pending() < 64:
            bench.engine.submit(queue.pop())
        if random.random() < 0.1:
            victim = int(random.choice(list(asked)))
            if victim not in {r.number for r in queue}:
                bench.engine.abort(victim)
                aborted.add(victim)
        if time.monotonic() - published > 0.5:
            bench.publish(int(random.integers(2)))
            published = time.monotonic()
        done += bench.engine.step()
    finished = {number for number in asked if sum(c.number == number for c in done) == 2}
    assert set(asked) - finished <= aborted
    assert len({(c.number, c.sample) for c in done}) == len(done)
    for index in random.choice(len(done), 80, replace=False):
        check(bench, asked[done[index].number].tokens, done[index])
    idle = time.monotonic() + 10
    while bench.engine.gauges().get("running") or bench.engine.gauges().get("kv_usage"):
        assert time.monotonic() < idle, f"something is left behind: {bench.engine.gauges()}"
        bench.run(bench.request(random, max_new_tokens=1))  # engines tell their load with their steps
    assert bench.engine.pending() == 0
