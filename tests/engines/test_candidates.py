"""Truncated sampling whose candidates are recorded, at a temperature other than 1: engine and trainer agree on what was
chosen from what, and how likely."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.protocols.experience import UNSAMPLED, Trajectory
from penstock.services.modeling.logprobs import logprobs
from penstock.services.modeling.packing import plan_rows
from penstock.services.rollout.config import SamplingConfig
from tests.engines.workbench import CLOSE, Workbench, make_models

TEMPERATURE, TOP_K, TOP_P, MIN_P = 0.3, 12, 0.8, 0.1


def kept_of(probabilities: torch.Tensor) -> torch.Tensor:
    """Those of one token's ``probabilities`` that vLLM draws from."""
    ranked = probabilities.sort(descending=True).values
    ranked = ranked[ranked >= MIN_P * ranked[0]][:TOP_K]
    before = ranked.cumsum(-1) - ranked
    return ranked[before < TOP_P * ranked.sum()]


@pytest.fixture(scope="module")
def masked(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    if options["type"] == "plugin":
        pytest.skip("the engine of --engine need not record candidates")
    folder = tmp_path_factory.mktemp("masked")
    sampling = SamplingConfig(temperature=TEMPERATURE, top_k=TOP_K, top_p=TOP_P, min_p=MIN_P, candidates=True)
    bench = Workbench(folder, make_models(folder), options, sampling)
    bench.publish(0)
    yield bench
    bench.engine.close()


def test_the_trainer_computes_over_what_the_sampler_kept(masked: Workbench) -> None:
    random = np.random.default_rng(0)
    sampling = {"temperature": TEMPERATURE, "top_k": TOP_K, "top_p": TOP_P, "min_p": MIN_P, "candidates": True}
    asked = {r.number: r for r in (masked.request(random, n=3, **sampling) for _ in range(6))}
    done = masked.run(*asked.values())
    trajectories, sizes = [], set()
    for completion in done:
        prompt = asked[completion.number].tokens
        ids = torch.from_numpy(np.concatenate([prompt, completion.tokens]).astype(np.int64))[None]
        with torch.no_grad():
            logs = (masked.models[0](ids).logits[0, len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)
        kept = np.split(completion.candidate_ids, np.cumsum(completion.candidate_counts)[:-1])
        for row, mine in zip(logs, kept, strict=True):
            assert len(mine) == len(kept_of(row.exp()))
            assert set(mine.tolist()) == set(row.argsort(descending=True)[: len(mine)].tolist())
            sizes.add(len(mine))
        new = len(completion.tokens)
        pad = np.zeros(len(prompt), np.int32)
        trajectories.append(
            Trajectory(
                ids[0].numpy().astype(np.int32), np.r_[pad, np.ones(new)].astype(np.uint8),
                np.r_[pad, completion.logprobs].astype(np.float32),
                np.r_[pad + UNSAMPLED, np.zeros(new)].astype(np.int32),
                candidate_counts=np.r_[pad, completion.candidate_counts], candidate_ids=completion.candidate_ids,
            )
        )  # fmt: skip
    assert len(sizes) > 5
    groups = [completion.number for completion in done]
    for rows in plan_rows(trajectories, groups, 512, torch.device("cpu")):
        with torch.no_grad():
            found = logprobs(masked.models[0], rows, TEMPERATURE)
        behaviour = rows.column([t.logprobs for t in trajectories])
        np.testing.assert_allclose(found[rows.mask], behaviour[rows.mask], atol=CLOSE)


def test_greedy_answers_beside_it_are_over_all_tokens(masked: Workbench) -> None:
    random = np.random.default_rng(1)
    request = masked.request(random, n=1, temperature=0.0)
    for completion in masked.run(request):
        assert completion.candidate_counts.size == 0
        expected = masked.expected(request.tokens, completion, masked.version)
        np.testing.assert_allclose(completion.logprobs, expected, atol=CLOSE)
