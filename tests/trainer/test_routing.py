"""Routing replay: the trainer sends tokens to the experts that an engine has sent them to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from penstock.protocols.columns import Column, ColumnTable
from penstock.protocols.experience import Group, Trajectory, as_bytes
from penstock.protocols.messages import Batch, TakenGroup
from penstock.protocols.packed_groups import pack_group
from penstock.protocols.routing import Mixture, no_routing, routing_dtype, unknown
from penstock.services.learning.batch import open_batch
from penstock.services.modeling.by_trajectory import by_trajectory
from penstock.services.modeling.experts import mixture_layers
from penstock.services.modeling.families import MIXTURES, OUR_ATTENTION
from penstock.services.modeling.load import attention_of, with_head
from penstock.services.modeling.logprobs import logprobs
from penstock.services.modeling.packing import plan_rows
from penstock.services.modeling.parallel.world import World
from penstock.services.modeling.routing import Recorder, Replay, mixture_of
from penstock.services.modeling.state_mixers import take_packed_rows
from penstock.services.runtime.errors import SetupError
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from tests import families
from tests.conftest import TINY, make_group
from tests.trainer.rank_program import CPU, a_mixture, a_model
from tests.trainer.steps import a_step, routed

TABLE = ColumnTable(columns=(Column(name="reward", scorer="reward", nullable=True),))
GROUPS = [number for number in range(3) for _ in range(4)]


def ours(model: Qwen3MoeForCausalLM) -> Qwen3MoeForCausalLM:
    model.set_attn_implementation(OUR_ATTENTION)
    return model.eval()


def trajectories() -> list[Trajectory]:
    random = np.random.default_rng(3)
    return [t for number in range(3) for t in make_group(random, number).trajectories]


def found(model: torch.nn.Module, some: Sequence[Trajectory], groups: Sequence[int], packed: bool) -> list[np.ndarray]:
    with torch.no_grad():
        routed = mixture_of(model) is not None
        passes = plan_rows(some, groups, 200, CPU, "packed" if packed else "either", routed)
        return by_trajectory(some, passes, lambda r: logprobs(model, r, 1.0))


def own(model: torch.nn.Module, some: Sequence[Trajectory]) -> list[Trajectory]:
    """With the experts that the model itself chooses."""
    recorder, with_it = Recorder(model), []
    for trajectory in some:
        with torch.no_grad(), recorder.noting() as noted:
            model(torch.from_numpy(trajectory.tokens.astype(np.int64))[None])
        with_it.append(replace(trajectory, routing=torch.stack(noted, 1).numpy().astype(np.uint8)))
    return with_it


@pytest.mark.parametrize("packed", [False, True])
def test_a_models_own_choice_changes_nothing(packed: bool) -> None:
    model, some = ours(a_mixture()), trajectories()
    wanted = found(model, some, GROUPS, packed)
    replay = Replay(model)
    for one, two in zip(wanted, found(model, own(model, some), GROUPS, packed), strict=True):
        np.testing.assert_allclose(two, one, atol=1e-6)
    assert replay.take_metrics(World(CPU)) == {"routing_other": 0.0} and replay.take_metrics(World(CPU)) == {}
    np.testing.assert_array_equal(found(model, some, GROUPS, packed)[0], wanted[0]), "and it can be left out"


def test_given_experts_are_those_of_a_model_that_has_no_others() -> None:
    """Of two experts with normalised weights, a router with only their rows chooses both, and weighs them alike."""
    shape = {**TINY, "moe_intermediate_size": 32, "norm_topk_prob": True, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    whole = ours(Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, num_experts=8)))
    two = ours(Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, num_experts=2)))
    pair = [6, 1]
    two.load_state_dict({
        name: weight[pair] if ".experts." in name or name.endswith("mlp.gate.weight") else weight
        for name, weight in whole.state_dict().items()
    })  # fmt: skip
    some = trajectories()
    layers = len(whole.model.layers)
    given = [replace(t, routing=np.full((len(t.tokens), layers, 2), pair, np.uint8)) for t in some]
    wanted, before = found(two, some, GROUPS, True), found(whole, some, GROUPS, True)
    replay = Replay(whole)
    for mine, other in zip(found(whole, given, GROUPS, True), wanted, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)
    assert max(np.abs(a - b).max() for a, b in zip(before, wanted, strict=True)) > 1e-3
    assert 0.5 < replay.take_metrics(World(CPU))["routing_other"] <= 1


def of_family(family: str, experts: int) -> Any:
    """A tiny one with random weights, whose routers' weights sum to the same whatever they choose."""
    config = families.config_of(family)
    text = config.get_text_config()
    counts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), experts)
    wanted = {**counts, "norm_topk_prob": True, "n_group": experts // 2}
    for name in wanted.keys() & {name for name in wanted if hasattr(text, name)}:
        setattr(text, name, wanted[name])
    torch.manual_seed(0)
    made = with_head(config, "language").from_config(
        config, dtype=torch.float32, attn_implementation=attention_of(config)
    )
    take_packed_rows(made)
    return made.eval()


@pytest.mark.parametrize("family", sorted(MIXTURES))
def test_every_family_of_mixtures_is_replayed(family: str) -> None:
    """As above, whatever its routers do to their scores; and what they choose by themselves is noted."""
    whole, two, pair, some = of_family(family, 4), of_family(family, 2), [3, 1], trajectories()
    layers = mixture_layers(whole.config.get_text_config())
    names = [name for name, _ in whole.named_parameters() if name.endswith(".experts.down_proj")]
    assert [int(re.findall(r"layers\.(\d+)\.", name)[0]) for name in names] == layers

    def of_experts(name: str) -> bool:
        return bool(re.search(r"\.experts\.|\.(gate|router)\.(weight|bias)$|e_score_correction_bias", name))

    with torch.no_grad():
        state = {n: w[pair] if of_experts(n) else w for n, w in whole.state_dict().items()}
        two.load_state_dict(state)
    wanted, before = found(two, some, GROUPS, True), found(whole, some, GROUPS, True)
    chosen = own(whole, some)
    replay = Replay(whole)
    assert replay.mixture == Mixture(len(layers), 2, 4)
    given = [replace(t, routing=np.full((len(t.tokens), len(layers), 2), pair, np.uint8)) for t in some]
    for mine, other in zip(found(whole, given, GROUPS, True), wanted, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)
    assert max(np.abs(a - b).max() for a, b in zip(before, wanted, strict=True)) > 1e-4
    assert 0.2 < replay.take_metrics(World(CPU))["routing_other"] <= 1
    for mine, other in zip(found(whole, chosen, GROUPS, True), before, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)
    assert replay.take_metrics(World(CPU)) == {"routing_other": 0.0}


def test_rows_that_share_a_prompt_and_rows_alone_are_sent_alike() -> None:
    model, some = ours(a_mixture()), routed(trajectories())
    Replay(model)
    # As of sessions on several rollouts: also their prompts were sent elsewhere.
    apart = [replace(t, routing=(t.routing + i).astype(np.uint8) % 8) for i, t in enumerate(some)]
    assert len(next(plan_rows(some, GROUPS, 9999, CPU, routed=True)).tokens) == 3
    assert sum(len(rows.tokens) for rows in plan_rows(apart, GROUPS, 9999, CPU, routed=True)) == 12
    for each in (some, apart, [apart[0], replace(apart[1], routing=no_routing()), *apart[2:]]):
        alone = [found(model, [t], [0], False)[0] for t in each]
        for packed in (False, True):
            for one, two in zip(found(model, each, GROUPS, packed), alone, strict=True):
                np.testing.assert_allclose(one, two, atol=1e-5)


def test_what_is_not_known_the_model_chooses() -> None:
    model, some = ours(a_mixture()), trajectories()
    wanted = found(model, some, GROUPS, True)
    chosen = own(model, some)
    for t in chosen:
        t.routing[::2, :, 1] = unknown(t.routing.dtype)
    Replay(model)
    mixed = [t if i % 3 else replace(t, routing=no_routing()) for i, t in enumerate(chosen)]
    for one, two in zip(found(model, mixed, GROUPS, True), wanted, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)


@pytest.mark.parametrize("how", [True, "selective"])
def test_a_layer_that_is_computed_again_gets_its_experts_again(how: object) -> None:
    gradients = []
    for given in ({"gradient_checkpointing": False}, {"gradient_checkpointing": how, "tokens_per_micro_batch": 40}):
        model = a_mixture()
        Replay(model)
        learner = Learner(model, TrainerConfig.model_validate(given), 1.0)
        loss, _ = learner.accumulate(a_step(1, routing=True))
        gradients.append((loss, {name: p.grad for name, p in learner.parameters.items()}))
    assert gradients[0][0] == pytest.approx(gradients[1][0], rel=1e-5)
    for name, wanted in gradients[0][1].items():
        torch.testing.assert_close(gradients[1][1][name], wanted, rtol=1e-5, atol=1e-7)


def test_a_step_says_how_often_the_router_would_have_chosen_otherwise() -> None:
    model = a_mixture()
    Replay(model)
    learner = Learner(model, TrainerConfig(), 1.0)
    assert 0.3 < learner.train(a_step(1, routing=True))["routing_other"] < 1
    assert "routing_other" not in learner.train(a_step(2))


@pytest.mark.parametrize(("shape", "expert"), [((2, 2), 1), ((1, 1), 1), ((1, 2), 8)])
def test_a_group_of_another_mixture_is_left_out_of_its_step(shape: tuple[int, int], expert: int) -> None:
    model = a_mixture()
    Replay(model)
    good, bad = (make_group(np.random.default_rng(3), number) for number in (3, 4))
    strange = replace(bad.trajectories[1], routing=np.full((len(bad.trajectories[1].tokens), *shape), expert, np.uint8))
    bad = replace(bad, trajectories=[strange])
    with_it = replace(good, trajectories=routed(good.trajectories))
    batch = Batch(step=5, seed=0, max_lag=9, groups=[taken(group) for group in (with_it, bad)], committed=5)
    step = open_batch(batch, TABLE, mixture_of(model))
    assert step.unreadable == 1 and set(step.groups.tolist()) == {3}
    assert open_batch(batch, TABLE).unreadable == 0, "nobody else reads it"


def taken(group: Group) -> TakenGroup:
    rewards = np.zeros(len(group.trajectories), np.float32)
    return TakenGroup(number=group.number, experience=as_bytes(pack_group(group)), columns={"reward": rewards})


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(SetupError, match="qwen3 is no mixture of experts"):
        Replay(a_model())
    assert routing_dtype(255) == np.uint8 and routing_dtype(256) == np.int16
