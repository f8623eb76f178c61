"""Whatever layout is proposed, `penstock run` takes: no key forbids it, and no GPU is given twice."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.pipeline.cli import app
from penstock.pipeline.config import Config, load
from penstock.pipeline.resources.choice import best_of, nothing_fits, overrides
from penstock.pipeline.resources.devices import devices_of
from penstock.pipeline.resources.gpus import total_gpus
from penstock.pipeline.resources.layout import Layout
from penstock.pipeline.resources.loads import half_of_the_longest, load_of
from penstock.pipeline.resources.memory import plan
from penstock.pipeline.resources.model_shape import shape_of
from penstock.pipeline.resources.placement import place
from penstock.pipeline.resources.readers import readers_each
from penstock.pipeline.resources.search import layouts, reference_s
from penstock.pipeline.resources.step_time import Load, forward_s, train_s
from penstock.pipeline.resources.trainer_shapes import shapes
from penstock.pipeline.simulate.costs import on_gpus
from penstock.pipeline.simulate.world import World

BIG = Path("configs/grpo-8b.yaml")
SMALL = "Qwen/Qwen2.5-0.5B-Instruct"
ALONE = "trainer.algorithm.kl.coefficient=0"


def searched(given: list[str], gpus: str, path: Path = BIG) -> tuple[Config, list[Layout]]:
    config, (count, device) = load(path, given), devices_of(gpus)
    shape = shape_of(config)
    assert shape
    return config, list(layouts(config, shape, count, device, load_of(config, half_of_the_longest(config))))


@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 2), (28, 4), (40, 8), (32, 8)])
def test_ranks_of_a_sequence_share_the_heads_that_tensor_parallelism_leaves(heads: int, kv_heads: int) -> None:
    shape = shape_of(load(BIG))
    assert shape
    trainer = load(BIG).trainer.model_copy(update={"ranks": 8, "lora": None})
    found = list(shapes(replace(shape, heads=heads, kv_heads=kv_heads), trainer))
    assert any(each.sequence_parallel > 1 for each in found) and any(each.tensor_parallel > 1 for each in found)
    for each in found:
        left, kv = heads // each.tensor_parallel, kv_heads // each.tensor_parallel
        assert not left % each.sequence_parallel
        assert not kv % each.sequence_parallel or not each.sequence_parallel % kv


@pytest.mark.parametrize(
    "forbids",
    ["weights.transport=nccl", "rollout.engine.start_s=1200",
     "rollout.engine={type: plugin, name: sglang, options: {url: [x, y, z], folder: /dev/shm/x}}"],
)  # fmt: skip
def test_nobody_shares_gpus_where_the_config_forbids_it(forbids: str) -> None:
    _, free = searched([ALONE], "8xH100")
    _, found = searched([ALONE, forbids], "8xH100")
    assert any(layout.colocated for layout in free) and found
    assert not any(layout.colocated for layout in found)


@pytest.mark.parametrize("also", [[], ["trainer.algorithm.preset=ppo", "rollout.sampling.n=2", f"critic.path={SMALL}"]])
def test_gpus_of_scorers_are_theirs(also: list[str]) -> None:
    scorer = "scorers={mine: {scorer: 'mine:Mine', columns: {mine: token}, gpus: 2}}"
    config, found = searched([scorer, *also], "8xH100")
    assert found and {layout.colocated for layout in found} == {False, True}
    for layout in found:
        made = load(BIG, [scorer, *also, *overrides(config, layout)])
        assert total_gpus(made) <= 8 and not plan(made).problems


@pytest.mark.parametrize("gpus", ["16xA100", "2xH100"])
def test_versions_that_engines_map_have_room_beside_the_trainer(gpus: str) -> None:
    given = ["weights.transport=cuda_ipc", ALONE, f"run.gpu_gib={devices_of(gpus)[1].gib:g}"]
    config, found = searched(given, gpus, path := Path("configs/grpo-3b.yaml"))
    assert any(layout.trainer.ranks == 1 for layout in found)
    for layout in found:
        assert not plan(load(path, [*given, *overrides(config, layout)])).problems


@pytest.mark.parametrize("also", [[ALONE], ["run.elsewhere=[trainer]"]])
@pytest.mark.parametrize("gpus", ["12xA100", "40xA100"])
def test_what_the_first_machine_has_no_gpus_for_joins(also: list[str], gpus: str) -> None:
    """Where one machine has them all, as `run.placement: auto` supposes, nobody does."""
    config, found = searched(["trainer.algorithm.kl.coefficient=0.001", *also], gpus)
    assert any(layout.trainer.nodes == 1 for layout in found)
    for layout in found:
        made = load(BIG, [*also, *overrides(config, layout, several=True)])
        place(made, [str(number) for number in range(8)])
        if layout.trainer.nodes == 1:
            assert not load(BIG, [*also, *overrides(config, layout)]).run.elsewhere


def test_the_embedded_engine_is_laid_out_where_all_its_slots_fit() -> None:
    engine = "rollout.engine={{type: torch, max_length: 4096, max_sequences: {}}}"
    config, found = searched([engine.format(256)], "8xH100")
    assert not found and "fewer rollout.engine.max_sequences" in nothing_fits(config, *devices_of("8xH100"))
    config, found = searched([engine.format(48)], "8xH100")
    assert {layout.colocated for layout in found} == {False, True}
    for layout in found:
        assert not plan(load(BIG, [engine.format(48), *overrides(config, layout)])).problems


def test_a_reference_within_the_trainer_takes_the_trainers_time() -> None:
    given = ["trainer.lora.rank=32", "reference.in_trainer=true"]
    config = load(BIG, given)
    step, device = load_of(config, half_of_the_longest(config)), devices_of("8xH100")[1]
    without = load_of(load(BIG, [*given, ALONE]), half_of_the_longest(config))
    shape = shape_of(config)
    assert shape and step == replace(without, in_trainer=True)
    more = train_s(shape, config.trainer, step, device) - train_s(shape, config.trainer, without, device)
    assert more == pytest.approx(forward_s(shape, config.trainer.ranks, step, device, 8192), rel=0.2)


def test_references_over_several_gpus_are_dealt_with_all_of_them() -> None:
    config, found = searched(["reference.gpus=2"], "4xH200")
    apart = [layout for layout in found if not layout.colocated]
    assert apart and len(apart) < len(found)
    for layout in apart:
        assert layout.trainer.ranks + layout.rollouts * layout.tensor_parallel + 2 * layout.references <= 4
    load_ = load_of(config, half_of_the_longest(config))
    one, two = (reference_s(each, load_, devices_of("4xH200")[1]) for each in (load(BIG), config))
    assert two == pytest.approx(one * (1 + 1 / 8) / 2), "some are idle at both ends of four passes each"
    assert readers_each(config, 4)[0] == 1 and readers_each(config, 2)[0] == 1
    assert not searched(["reference.gpus=2"], "1xH200")[1], "nobody shares a GPU with itself"
    wide = [layout for layout in found if layout.colocated]
    assert wide and all(layout.trainer.ranks >= 2 for layout in wide)
    for layout in found:
        place(load(BIG, ["reference.gpus=2", *overrides(config, layout)]), ["0", "1", "2", "3"])


def test_several_references_may_lie_on_one_gpu() -> None:
    config, found = searched(["reference.count=3"], "2xH200")
    shared = [layout for layout in found if layout.colocated]
    assert shared and readers_each(config, 2)[0] == 2 and readers_each(config, 4)[0] == 1
    for layout in shared:
        made = load(BIG, ["reference.count=3", *overrides(config, layout), "run.gpu_gib=141"])
        assert not plan(made).problems
        if layout.trainer.lora and layout.trainer.lora.quantize:  # and so are the references
            continue
        assert layout.share == pytest.approx(
            math.floor(20 * (1 - (1.5 + 2 * (16.38e9 / 2**30 + 3)) / 141)) / 20, abs=0.051
        )


@pytest.mark.parametrize(
    "key",
    [
        "rollout.engine.vllm.data_parallel_size=2", "rollout.engine.vllm.pipeline_parallel_size=2",
        "rollout.engine.vllm.quantization=fp8", "rollout.engine.vllm.kv_cache_dtype=fp8",
        "rollout.engine.vllm.kv_cache_memory_bytes=1000000000",
    ],
)  # fmt: skip
def test_what_keeps_the_search_from_looking_is_said(key: str) -> None:
    config, found = searched([key], "8xH100")
    assert not found
    assert nothing_fits(config, *devices_of("8xH100")).startswith(f"no layout was looked for on 8 x H100: {key}: ")


@pytest.mark.parametrize("gpus", ["2xH100", "4xH100", "8xA100"])
def test_without_lag_the_first_row_is_what_is_taken(gpus: str) -> None:
    given = ["gate.max_lag=0", ALONE]
    config, found = searched(given, gpus)
    best, _ = best_of(config, found)
    shown = CliRunner().invoke(app, ["plan", str(BIG), *given, "--gpus", gpus]).output
    first = re.findall(r"(\d+\.\d)\s*$", shown[shown.index(": the fastest that fit") :], re.MULTILINE)[0]
    assert first == f"{best.synchronous_s:.1f}"


def test_a_longer_prompt_takes_longer() -> None:
    """As the simulator says of an engine, with as many sequences as it has room for."""
    (count, device), config = devices_of("8xH100"), load(BIG, [ALONE])
    shape = shape_of(config)
    assert shape and load_of(config, 100, 900) == Load(100.0 * 64 * 8, 1000.0, 900.0, group=8)
    assert load_of(config, 100).prompt == 256
    for prompt in (0, 256, 8000):
        one = next(layouts(config, shape, count, device, load_of(config, 1000, prompt)))
        made = load(BIG, [ALONE, *overrides(config, one)])
        costs = on_gpus(made, shape, device, 1000, prompt)
        each = 64 * 8 / one.rollouts
        batch = min(each, costs.most_sequences or each, config.rollout.engine.max_sequences)  # type: ignore[union-attr]
        token_s = max(costs.decode_s + batch * costs.decode_sequence_s, batch * costs.decode_compute_s)
        read_s = 64 / one.rollouts * prompt * costs.prefill_token_s
        assert one.generate_s == pytest.approx(1000 * each / batch * token_s + read_s, rel=0.02)
    for more, tokens in (([], "256"), (["--prompt", "8000"], "8,000")):
        shown = CliRunner().invoke(app, ["plan", str(BIG), "--gpus", "8xH100", *more]).output
        assert f"tokens to prompts of {tokens};" in " ".join(shown.split())


@pytest.mark.parametrize("shares", [True, False])
def test_prompts_are_computed_by_trainer_critic_and_reference(shares: bool) -> None:
    """As if they were sampled, but for the head; once for as many answers of a group as there is room for."""
    config, device = load(BIG, ["trainer.algorithm.preset=ppo", f"critic.path={SMALL}"]), devices_of("8xH100")[1]
    found = shape_of(config)
    assert found and found.shares
    shape, trainer = replace(found, shares=shares), config.trainer
    for seconds_of in (
        lambda step, budget: forward_s(shape, 8, step, device, budget),
        lambda step, n: train_s(shape, trainer.model_copy(update={"tokens_per_micro_batch": n}), step, device),
    ):
        said, sampled = Load(256e4, 256.0), Load(3256e4, 3256.0)
        alone = seconds_of(Load(256e4, 3256.0, 3000.0), 32768)
        assert alone == pytest.approx(seconds_of(sampled, 32768), rel=0.15)
        assert alone > 10 * seconds_of(said, 32768)
        fits, splits = (seconds_of(Load(256e4, 3256.0, 3000.0, group=8), budget) for budget in (32768, 4100))
        assert fits == pytest.approx(alone / 4 if shares else alone, rel=0.4)
        assert splits > 1.2 * fits if shares else splits >= fits
    short, long = (on_gpus(config, found, device, 256, prompt) for prompt in (64, 3000))
    for key in ("train_token_s", "critic_values_token_s", "critic_train_token_s", "score_token_s"):
        assert getattr(long, key) > 1.5 * getattr(short, key)


@pytest.mark.parametrize(
    ("gpus", "colocated"), [pytest.param("8xH100", True, marks=pytest.mark.chaos), ("24xH100", False)]
)
def test_nobody_waits_for_a_reference_that_was_not_counted(gpus: str, colocated: bool) -> None:
    """What a layout takes is about what the simulator says, whose groups are not alike, with as many references as
    pay."""
    config, found = searched([], gpus)
    best, _ = best_of(config, [layout for layout in found if layout.colocated == colocated])
    words = overrides(config, best, int(gpus.partition("x")[0]) > 8)
    made, (count, device) = load(BIG, words), devices_of(gpus)
    assert made.reference.count == best.references > 1 and total_gpus(made) <= count
    shape, step = shape_of(made), load_of(made, half_of_the_longest(made))
    assert shape
    costs = on_gpus(made, shape, device, step.length - step.prompt, step.prompt)
    beside = best.tensor_parallel if colocated else 1  # of which an engine waits for each
    assert best.references * best.reference_s == pytest.approx(beside * step.tokens * costs.score_token_s)
    assert World(made, costs, 12).run().steps_per_s == pytest.approx(1 / best.step_s, rel=0.3)


def test_where_one_reference_is_all_that_there_is_room_for_it_is_named() -> None:
    big = ["reference.path=Qwen/Qwen3-32B", "run.placement=as_given", "weights.transport=nccl"]
    config, found = searched(big, "4xH100", Path("configs/grpo-0.5b.yaml"))
    best, why = best_of(config, found)
    assert best.step_s == best.reference_s > best.train_s
    assert any("the reference takes longest" in reason for reason in why)


def test_a_response_has_a_length() -> None:
    assert CliRunner().invoke(app, ["plan", str(BIG), "--gpus", "8xH100", "--length", "-5"]).exit_code == 2


@pytest.mark.parametrize("given", ["trainer.freeze=['*.layers.?.*']", "trainer.train_towers=true"])
def test_no_adapter_is_proposed_beside_what_none_trains(given: str) -> None:
    file = Path("configs/geometry3k.yaml")
    _, plain = searched([], "8xH100", file)
    _, whole = searched([given], "8xH100", file)
    assert {layout.trainer.lora is None for layout in plain} == {True, False}
    assert whole and all(layout.trainer.lora is None for layout in whole)
