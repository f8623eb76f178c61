"""Muon is torch's, in fp32; it has what is a hidden matrix, and AdamW all else; and ranks deal matrices out exactly."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForTokenClassification

from penstock.services.learning import checkpoint, dealt_matrices
from penstock.services.learning.dealt_matrices import DealtMatrices
from penstock.services.learning.host_moments import MOMENTS
from penstock.services.learning.muon import MOMENTUM, Muon, hidden_matrices, orthogonalize
from penstock.services.learning.optimizer import make_optimizer, set_rate
from penstock.services.learning.optimizer_config import OptimizerConfig
from penstock.services.modeling.parallel.start import load_trainable
from penstock.services.modeling.parallel.world import Shape, World
from tests import families
from tests.conftest import TINY
from tests.trainer.rank_program import a_mixture, a_model
from tests.trainer.test_checkpoint import CPU, a_learner, continues_exactly

LR, DECAY = 3e-3, 0.1


def the_optimizer(model: Any, **choices: Any) -> Muon:
    config = OptimizerConfig(type="muon", lr=LR, weight_decay=DECAY, **choices)
    found = make_optimizer(model, dict(model.named_parameters()), config, World(CPU))
    assert isinstance(found, Muon)
    return found


@pytest.mark.parametrize("nesterov", [True, False])
def test_twenty_steps_are_torchs(nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch iterates in bf16 alone: here its own code is made to do so in fp32."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    ours, theirs = a_model(), dict(a_model().named_parameters())
    matrices = [name for name, p in theirs.items() if p.ndim == 2 and "embed" not in name and "lm_head" not in name]
    muon = torch.optim.Muon(
        [theirs[name] for name in matrices], lr=LR, weight_decay=DECAY, momentum=0.9, nesterov=nesterov,
        adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    rest = [p for name, p in theirs.items() if name not in matrices]
    vectors = {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0}
    ends = {"params": [p for p in rest if p.ndim > 1]}
    adamw = torch.optim.AdamW([ends, vectors], lr=LR, weight_decay=DECAY, betas=(0.9, 0.95))
    every = (muon, adamw, the_optimizer(ours, momentum=0.9, nesterov=nesterov))
    random = torch.Generator().manual_seed(1)
    for step in range(20):
        for name, parameter in ours.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=random)
            theirs[name].grad = parameter.grad.clone()
        for each in every:
            set_rate(each, LR / (1 + step))
            each.step()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-6, atol=1e-6, msg=name)


def test_in_16_bits_the_iteration_is_torchs() -> None:
    from torch.optim._muon import _zeropower_via_newtonschulz

    for shape in ((16, 40), (40, 16)):
        given = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        wanted = _zeropower_via_newtonschulz(given, (3.4445, -4.7750, 2.0315), 5, 1e-7)
        found = orthogonalize(given.bfloat16()[None], 5)[0]
        torch.testing.assert_close(found, wanted, rtol=0, atol=0.01)


@settings(deadline=None, max_examples=40)
@given(m=st.integers(1, 40), n=st.integers(1, 40), size=st.floats(-4, 4), seed=st.integers(0, 99))
def test_singular_values_become_alike_and_vectors_stay(m: int, n: int, size: float, seed: int) -> None:
    matrix = torch.randn(m, n, generator=torch.Generator().manual_seed(seed)) * 10**size
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    found = left.mT @ orthogonalize(matrix[None], 5)[0] @ right.mT
    reached = found.diagonal()[values > values[0] / 30]  # what is nearly not there is not made much of
    assert reached.min() > 0.5 and reached.max() < 1.25
    assert (found - found.diagonal().diag()).abs().max() < 1e-3
    assert not orthogonalize(torch.zeros(1, m, n), 5).any()


def test_experts_are_a_matrix_each_and_a_gate_is_another_than_what_it_gates() -> None:
    model = a_mixture()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    the_optimizer(model).step()
    for name, parameter in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            moved = (before[name] * (1 - LR * DECAY) - parameter.detach()) / LR
            for number, expert in enumerate(parameter.grad):  # type: ignore[arg-type]
                for half in (slice(0, 32), slice(32, 64)):
                    wanted = 0.2 * 64**0.5 * orthogonalize(expert[None, half], 5)[0]
                    torch.testing.assert_close(moved[number, half], wanted, rtol=0, atol=2e-4)
            return
    raise AssertionError("no experts")


def test_embedding_head_and_vectors_are_not_hidden() -> None:
    model = a_mixture()
    found = hidden_matrices(model, dict(model.named_parameters()))
    names = {name.split("layers.")[-1].removesuffix(".weight"): found.get(p) for name, p in model.named_parameters()}
    hidden = {name: above for name, above in names.items() if above}
    assert {"1.mlp.experts.gate_up_proj": 2, "1.mlp.experts.down_proj": 1, "1.mlp.gate": 1}.items() <= hidden.items()
    assert names.keys() - hidden.keys() >= {"model.embed_tokens", "lm_head", "model.norm", "0.input_layernorm"}
    assert all("norm" not in name for name in hidden)
    critic = LlamaForTokenClassification(LlamaConfig(**TINY, num_labels=1))
    parameters = dict(critic.named_parameters())
    assert len(hidden_matrices(critic, parameters)) == 14 and parameters["score.weight"].ndim == 2


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_no_bias_decays_of_experts_neither(kind: str, tmp_path: Path) -> None:
    model = families.write("gpt_oss", tmp_path)
    config = OptimizerConfig.model_validate({"type": kind, "weight_decay": 0.1})
    optimizer = make_optimizer(model, dict(model.named_parameters()), config, World(torch.device("cpu")))
    decaying = {id(each) for group in optimizer.param_groups if group["weight_decay"] for each in group["params"]}
    biases = {name for name, each in model.named_parameters() if name.endswith("bias")}
    assert any("experts.down_proj_bias" in name for name in biases)
    assert not [name for name, each in model.named_parameters() if name in biases and id(each) in decaying]


def test_a_run_goes_on_bit_by_bit_and_with_no_other_type(tmp_path: Path) -> None:
    saved = continues_exactly(tmp_path, type="muon", weight_decay=0.1)
    again = a_learner(load_trainable(str(saved), World(CPU), CPU, "float32"), type="muon")
    checkpoint.restore(again, saved)
    kept = [set(again.optimizer.state[parameter]) for parameter in again.parameters.values()]
    assert {MOMENTUM} in kept and {"step", *MOMENTS} in kept and {MOMENTUM, *MOMENTS} not in kept
    other = a_learner(load_trainable(str(saved), World(CPU), CPU, "float32"))
    with pytest.raises(
        checkpoint.CheckpointError, match=r"trainer\.optimizer: .* exp_avg.* is wanted; go on with the type"
    ):
        checkpoint.restore(other, saved)


class Board:
    """An all-to-all between threads."""

    def __init__(self, size: int) -> None:
        self.mine = threading.local()
        self._size, self._barrier = size, threading.Barrier(size)
        self._sent: list[list[torch.Tensor]] = [[] for _ in range(size)]

    def exchange(self, rows: torch.Tensor, group: Any, sent: list[int], received: list[int]) -> torch.Tensor:
        place = self.mine.place
        assert sum(sent) == len(rows)
        self._sent[place] = [rows[first:end] for first, end in pairwise(accumulate(sent, initial=0))]
        self._barrier.wait(60)
        found = [self._sent[other][place].clone() for other in range(self._size)]
        assert [len(each) for each in found] == received, "each knows what the others send"
        self._barrier.wait(60)
        return torch.cat(found)


SIZES = st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from([None, 0, 1]))


@settings(deadline=None, max_examples=40)
@given(sizes=st.lists(SIZES, min_size=1, max_size=7), shards=st.integers(1, 3), tensor=st.integers(1, 2))
def test_every_matrix_comes_whole_to_one_rank_and_every_part_back(
    sizes: list[tuple[int, int, int | None]], shards: int, tensor: int
) -> None:
    size, board = shards * tensor, Board(shards * tensor)
    wholes = [torch.arange(m * n, dtype=torch.float32).view(m, n) + 100 * i for i, (m, n, _) in enumerate(sizes)]
    parameters = [torch.nn.Parameter(whole) for whole in wholes]
    along = {id(p): cut if tensor > 1 else None for p, (_, _, cut) in zip(parameters, sizes, strict=True)}

    def a_place(number: int) -> Any:
        return SimpleNamespace(rank=number, shards=shards, shape=Shape(tensor=tensor), cut_group="all")

    def rank(place: int) -> list[int]:
        board.mine.place = place
        dealt, seen = DealtMatrices(parameters, a_place(place)), []
        for some in dealt.rounds:
            mine = [each.parameter.detach()[each.blocks[place]].reshape(-1) for each in some]
            owned = dealt.gather(some, mine)
            assert all(any(torch.equal(whole, each) for each in wholes) for whole in owned)
            seen += [int(whole[0, 0]) for whole in owned]
            for part, before in zip(dealt.scatter(some, [-w for w in owned], mine[0][:0]), mine, strict=True):
                assert torch.equal(part, -before)
        return seen

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(size) as pool:
        patch.setattr(dealt_matrices, "exchange", board.exchange)
        patch.setattr(dealt_matrices, "_tensor_dimension", lambda parameter: along[id(parameter)])
        patch.setattr(dealt_matrices, "ROUND_NUMBERS", 40)
        seen = [number for of_rank in pool.map(rank, range(size)) for number in of_rank]
    assert sorted(seen) == sorted(int(whole[0, 0]) for whole in wholes), "each has one owner"
