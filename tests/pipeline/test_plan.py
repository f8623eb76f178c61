"""What a run needs of GPUs, counted from config.json."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from typer.testing import CliRunner

from penstock.pipeline.bench.memory import compare
from penstock.pipeline.cli import app
from penstock.pipeline.config import ConfigError, load
from penstock.pipeline.resources.devices import devices_of
from penstock.pipeline.resources.gpus import total_gpus
from penstock.pipeline.resources.host import host_needs
from penstock.pipeline.resources.memory import embedded_gib, mapped_gib, plan
from penstock.pipeline.resources.model_files import read_config
from penstock.pipeline.resources.model_shape import shape_of
from penstock.pipeline.resources.placement import beds, place
from penstock.pipeline.resources.search import FILL, critic_times, layouts, with_references
from penstock.pipeline.resources.shares import too_much
from penstock.pipeline.resources.step_time import Load, train_s
from penstock.pipeline.resources.trainer_memory import OVERHEAD_GIB, keeps_whole_gradients, trainer_gib
from penstock.pipeline.resources.trainer_shapes import shapes
from penstock.pipeline.simulate.costs import Costs
from penstock.pipeline.simulate.world import World
from penstock.services.learning.optimizer_config import OptimizerConfig
from penstock.services.runtime import registry
from penstock.services.trainer.config import TrainerConfig

CONFIGS = sorted(Path("configs").glob("*.yaml"))
LARGE, SMALL = "Qwen/Qwen3-32B", "Qwen/Qwen2.5-0.5B-Instruct"
GRPO = [path for path in CONFIGS if path.name.startswith("grpo-")]
JUDGED = ('scorers={judge: {scorer: "mine:Judge", columns: {judged: token}}}', "run.elsewhere=[rollout,trainer,judge]")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_passes_the_dry_run(path: Path) -> None:
    result = CliRunner().invoke(app, ["run", str(path), "--dry-run"])
    assert result.exit_code == 0, result.output
    assert ("# GPUs: " in result.output) == (
        path in GRPO or path.stem in ("gsm8k", "one-gpu", "one-gpu-7b", "geometry3k")
    )


@pytest.mark.parametrize("path", GRPO, ids=lambda path: path.stem)
def test_the_disk_that_a_config_says_is_what_the_plan_says(path: Path) -> None:
    needs = host_needs(load(path))
    assert needs and f"take {needs.checkpoints:,.0f} GiB of disk" in path.read_text()


def test_parameters_are_those_of_the_real_models() -> None:
    found = {path.stem: shape_of(load(path)).parameters / 1e9 for path in GRPO}
    wanted = {"grpo-0.5b": 0.494, "grpo-3b": 3.09, "grpo-8b": 8.19, "grpo-32b": 32.76, "grpo-70b": 70.55,
              "grpo-30b-a3b": 30.53}  # fmt: skip
    assert found == pytest.approx(wanted, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides"),
    [("8b", "trainer.ranks=8 trainer.tensor_parallel=2 trainer.gradient_checkpointing=selective"),
     *(pytest.param(*case, marks=pytest.mark.chaos) for case in (
         ("30b-a3b", "trainer.ranks=512 trainer.expert_parallel=64"),
         ("8b", "trainer.ranks=2 trainer.lora.rank=64"),
         ("8b", "trainer.ranks=8 trainer.gradient_checkpointing=false trainer.tokens_per_micro_batch=4096"),
         ("8b", "trainer.ranks=1 model.dtype=float32 trainer.tokens_per_micro_batch=4096"),
         ("8b", "trainer.ranks=8 model.dtype=float32 trainer.tokens_per_micro_batch=4096"),
         ("8b", "trainer.ranks=8 trainer.tokens_per_micro_batch=64 trainer.optimizer.type=muon"),
         ("3b", "trainer.ranks=4 trainer.sum_gradients=step model.head_dtype=float32"),
         ("0.5b", "trainer.lora.targets=[q_proj,v_proj]"),
         ("8b", "trainer.ranks=8 trainer.lora.rank=32 trainer.gradient_checkpointing=selective "
                "trainer.reshard_after=update"),
         ("8b", "trainer.ranks=8 trainer.reshard_after=update trainer.gradient_checkpointing=true "
                "trainer.tokens_per_mlp=2048 trainer.tokens_per_micro_batch=32768"),
         ("8b", "trainer.ranks=16 trainer.replicas=2 trainer.sequence_parallel=2"), ("30b-a3b", ""),
         ("8b", "trainer.ranks=8 trainer.pipeline_parallel=4 trainer.gradient_checkpointing=selective")))],
)  # fmt: skip
def test_the_plan_is_what_the_code_allocates(name: str, overrides: str, tmp_path: Path) -> None:
    """Within a tenth, by tensors without contents; of large models a few layers, since each is as the other."""
    path = Path(f"configs/grpo-{name}.yaml")
    about = read_config(load(path))
    assert about
    # What stands beside all layers counts for less where there are many: two of them make it look large.
    many = any(word in overrides for word in ("pipeline", "muon", "lora"))
    less = {} if name == "0.5b" else {"num_hidden_layers": 4 if many else 2}
    (tmp_path / "config.json").write_text(json.dumps(about | less))
    for found in compare(path, [f"model.path={tmp_path}", *overrides.split()]):
        assert found.plan == pytest.approx(found.peak, rel=0.1), found.process
        assert found.peak < 80


@pytest.mark.parametrize(
    ("family", "key"),
    [("qwen3_5_text", "sequence_parallel"), ("granite", "pipeline_parallel"), ("gpt_oss", "tensor_parallel")],
)
def test_what_a_family_is_not_shared_by_is_refused(family: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(AutoConfig.for_model(family).to_json_string(use_diff=False))
    keys = [f"model.path={tmp_path}", "rollout.engine.max_length=4096", "trainer.ranks=2", f"trainer.{key}=2"]
    problems = plan(load(Path("configs/grpo-8b.yaml"), keys)).problems
    assert any(f"trainer.{key}=2: " in problem and "of no family that is shared so" in problem for problem in problems)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "told", "overrides"),
    [("glm4_moe_lite", {"num_hidden_layers": 3}, ""),
     *(pytest.param(*case, marks=pytest.mark.chaos) for case in (
         ("glm4_moe", {"num_hidden_layers": 3}, "trainer.gradient_checkpointing=false"),
         ("qwen3_5_moe_text", {"num_hidden_layers": 4}, "trainer.expert_parallel=4"),
         ("qwen3_5_moe_text", {"num_hidden_layers": 4}, "trainer.lora.rank=32"),
         ("qwen3_5_text", {"num_hidden_layers": 4}, "trainer.gradient_checkpointing=selective"),
         ("gpt_oss", {"num_hidden_layers": 3, "num_local_experts": 32}, "")))],
)  # fmt: skip
def test_the_plan_knows_layers_that_differ(family: str, told: dict[str, Any], overrides: str, tmp_path: Path) -> None:
    """Those of a family's own sizes: experts beside a plain part, or behind plain layers; linear attention, which takes
    more as torch's reference code has it."""
    config = AutoConfig.for_model(family, **told)
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    shape = ["trainer.ranks=8", "trainer.sequence_parallel=1", "trainer.expert_parallel=1", *overrides.split()]
    keys = [f"model.path={tmp_path}", "rollout.engine.max_length=4096", *shape]
    (found,) = compare(Path("configs/grpo-30b-a3b.yaml"), keys)
    assert found.plan == pytest.approx(found.peak, rel=0.15)


@pytest.mark.parametrize("path", GRPO, ids=lambda path: path.stem)
def test_layouts_are_what_the_plan_says_of_them(path: Path) -> None:
    """Whatever is offered fits as a config of its own, on so many GPUs, and is what its overrides make."""
    result = CliRunner().invoke(app, ["plan", str(path), "--gpus", "48xH100"])
    assert result.exit_code == 0, result.output
    assert "together" in result.output and "GiB on the trainer's first node" in result.output.replace("\n", " ")
    (first,) = [line for line in result.output.splitlines() if line.startswith("take the first: ")]
    config = load(path, ["run.gpu_gib=80", *shlex.split(first.removeprefix("take the first: "))])
    plan(config).check()
    assert total_gpus(config) <= 48


@pytest.mark.parametrize("path", GRPO, ids=lambda path: path.stem)
def test_whatever_shape_is_searched_a_config_takes_and_none_that_fits_is_much_faster(path: Path) -> None:
    config = load(path)
    shape, (count, device) = shape_of(config), devices_of("24xA100")
    assert shape
    step = Load(1e6, 1500.0)
    found = list(layouts(config, shape, count, device, step))
    assert {bool(layout.trainer.lora) for layout in found} == {False, True}
    for layout in found:
        assert layout.trainer_gib <= device.gib
        same = {"ranks": layout.trainer.ranks, "nodes": layout.trainer.nodes, "lora": layout.trainer.lora}
        plain = config.trainer.model_copy(update=same)
        every = list(shapes(shape, plain))
        for trainer in every:
            TrainerConfig.model_validate(trainer.model_dump())
        room = FILL * device.gib - 2 * OVERHEAD_GIB * layout.colocated
        fits = [each for each in every if trainer_gib(shape, each, device.gib) <= room]
        assert layout.train_s <= 1.15 * min(train_s(shape, each, step, device) for each in fits)


def test_a_step_with_several_updates_takes_a_forward_pass_more() -> None:
    config = load(Path("configs/grpo-3b.yaml"))
    shape, (_, device) = shape_of(config), devices_of("8xH100")
    assert shape
    step, one = Load(1e6, 1500.0), config.trainer.model_copy(update={"epochs": 1, "mini_batches": 1})
    two = one.model_copy(update={"mini_batches": 2})
    more = {
        ratio: train_s(shape, two.model_copy(update={"algorithm": one.algorithm.model_copy(update={"ratio": ratio})}),
                       step, device) / train_s(shape, one, step, device)
        for ratio in ("proximal", "interpolated")
    }  # fmt: skip
    assert more["interpolated"] == pytest.approx(1.0, abs=0.02)
    assert 1.2 < more["proximal"] < 1.35, "a forward beside a forward, a backward and what is computed again"


def test_muon_keeps_half_as_much_but_of_the_ends_and_computes_more() -> None:
    config = load(Path("configs/grpo-8b.yaml"))
    shape, (_, device) = shape_of(config), devices_of("8xH100")
    assert shape
    muon = config.trainer.model_copy(update={"optimizer": OptimizerConfig(type="muon")})
    less = trainer_gib(shape, config.trainer) - trainer_gib(shape, muon)
    assert less == pytest.approx(4 * (shape.parameters - shape.ends) / config.trainer.ranks / 2**30)
    more = train_s(shape, muon, Load(1e6, 1500.0), device) - train_s(shape, config.trainer, Load(1e6, 1500.0), device)
    inner, wide = 4096, 12288  # of the three that are most of it, on 0.35 of 989 TFLOP/s, over the ranks
    flops = 5 * 36 * 3 * (4 * inner**2 * wide + 2 * inner**3)
    assert 1.0 < more / (flops / config.trainer.ranks / (0.35 * 989e12)) < 1.5


def test_why_a_layout_is_the_first_is_said() -> None:
    result = CliRunner().invoke(app, ["plan", "configs/grpo-32b.yaml", "--gpus", "32xH100"])
    said = " ".join(result.output.split())
    assert re.search(r"why: with fewer ranks \(\d+\), (training|generating) takes longest, and a step [\d.]+ s", said)
    assert re.search(r"why: 32 ranks \(.*\) would train in [\d.]+ s and not [\d.]+, but take 1\d\d GiB each", said)


@pytest.mark.parametrize(
    "gpus, more, elsewhere, there",
    [("8xH100", (), [], True), ("24xH100", (), ["rollout", "trainer"], False), ("8xH100", JUDGED, ["judge"], True)],
    ids=["one machine", "three", "a scorer stays elsewhere"],
)
def test_a_layout_of_one_machine_needs_nobody_to_join(
    gpus: str, more: tuple[str, ...], elsewhere: list[str], there: bool
) -> None:
    """configs/grpo-32b.yaml is for several machines, and says who joins."""
    result = CliRunner().invoke(app, ["plan", "configs/grpo-32b.yaml", *more, "--gpus", gpus])
    taken = shlex.split(result.output.partition("take the first: ")[2])
    config = load(Path("configs/grpo-32b.yaml"), [*more, *taken])
    assert list(config.run.elsewhere) == elsewhere
    here = {spec.kind for spec in registry.started_here(config) if spec.count(config)}
    assert ({"trainer", "rollout"} <= here) == there


def test_what_fits_nowhere_is_said_with_what_would_help() -> None:
    result = CliRunner().invoke(app, ["plan", "configs/grpo-70b.yaml", "--gpus", "2xH100"])
    assert "nothing fits 2 x H100 of 80 GiB" in result.output
    result = CliRunner().invoke(app, ["plan", "configs/grpo-8b.yaml", "trainer.ranks=1", "--gpus", "8xA100-40"])
    assert result.exit_code == 1 and "does not fit: trainer.ranks=1" in result.output.replace("\n", " ")
    result = CliRunner().invoke(app, ["plan", "configs/grpo-8b.yaml", "--gpus", "8xT1000"])
    assert result.exit_code != 0 and "'8xT1000' is not like 8xH100" in str(result.exception)
    result = CliRunner().invoke(app, ["plan", "configs/quickstart.yaml"])
    assert "a tiny model needs no plan; give a config with model: {type: pretrained" in str(result.exception)


@pytest.mark.parametrize(
    ("path", "gpus", "says"),
    [
        ("grpo-8b", "4xH100", "does not fit: this run wants 8 GPUs (trainer 4,"),
        ("grpo-32b", "8xH100", "does not fit: this run wants 24 GPUs (trainer 16,"),
        ("grpo-8b", "8xH100", ""),
        ("grpo-3b", "2xA100-40", "GPU 0 (40 GiB) is shared by"),
        ("grpo-0.5b", "2xH100", ""),  # which they share, as in a run
    ],
)
def test_a_config_that_wants_more_gpus_does_not_fit(path: str, gpus: str, says: str) -> None:
    result = CliRunner().invoke(app, ["plan", f"configs/{path}.yaml", "--gpus", gpus])
    assert result.exit_code == bool(says) and says in " ".join(result.output.split()), result.output


@pytest.mark.parametrize(
    ("path", "override", "message"),
    [
        ("grpo-70b", "rollout.engine.vllm.tensor_parallel_size=1", r"tensor_parallel_size=1: 131\.\d GiB .* no room"),
        ("grpo-70b", "rollout.engine.vllm.tensor_parallel_size=3", "does not divide 64 heads and 8 KV heads"),
        ("grpo-70b", "trainer.algorithm.kl.coefficient=0.001", "reference's 135"),
        ("grpo-32b", "trainer.ranks=4", r"trainer\.ranks=4: .*; 16 ranks|trainer\.ranks=4: .*; 8 ranks"),
        ("grpo-8b", "rollout.engine.max_length=50000", "has positions for 40960"),
        ("grpo-8b", "trainer.expert_parallel=2", r"trainer\.expert_parallel=2 .* no experts"),
        ("grpo-30b-a3b", "trainer={ranks: 12, expert_parallel: 3}", "does not divide the 128 experts"),
        ("grpo-32b", "trainer={ranks: 4, tensor_parallel: 4}", r"trainer\.ranks=4: .*; (8|16|32) ranks with"),
        ("grpo-8b", "trainer={ranks: 16, tensor_parallel: 16}", r"tensor_parallel=16 does not divide .* 8 of keys"),
        (
            "grpo-8b",
            "trainer={ranks: 64, sequence_parallel: 32, tensor_parallel: 2}",
            r"sequence_parallel=32: 16 attention heads and 4 of keys and values of each rank",
        ),
        ("quickstart", "trainer={ranks: 8, sequence_parallel: 8}", "sequence_parallel=8: 4 attention heads"),
        (
            "grpo-8b",
            "rollout.engine={type: torch, max_length: 4096}",
            r"rollout\.engine\.max_sequences=256: .* set it to",
        ),
    ],
)
def test_what_cannot_fit_is_an_error_that_names_the_key(path: str, override: str, message: str) -> None:
    found = plan(load(Path(f"configs/{path}.yaml"), [override]))
    with pytest.raises(ConfigError, match=message):
        found.check()


@pytest.mark.parametrize("slower", [1, 150])
@pytest.mark.parametrize("max_lag", [0, 4])
def test_a_step_beside_a_critic_takes_what_the_simulator_says(max_lag: int, slower: int) -> None:
    """Whoever takes longest, with the simulator's own order of things; what that leaves out is short."""
    keys = ["trainer.algorithm.preset=ppo", "rollout.sampling.n=1", f"critic.path={SMALL}", f"gate.max_lag={max_lag}"]
    keys += ["gate.groups_per_step=64", "gate.prefetch=64", "rollout.engine={type: torch, max_length: 4096}"]
    config, device = load(Path("configs/grpo-3b.yaml"), keys), devices_of("8xH100")[1]
    load_ = Load(64 * 1024.0, 1200.0)
    values_s, learns_s = (slower * seconds for seconds in critic_times(config, load_, device))
    shape = shape_of(config)
    assert shape
    one = next(each for each in layouts(config, shape, 8, device, load_) if each.trainer.ranks == 2)
    told = dataclasses.replace(one, values_s=values_s, critic_s=learns_s, reference_s=one.reference_s * (not max_lag))
    costs = Costs(
        length=1024, length_spread=0, reward_spread=0, decode_s=told.generate_s / 1024,
        train_token_s=told.train_s / load_.tokens, critic_values_token_s=values_s / load_.tokens,
        critic_train_token_s=learns_s / load_.tokens, score_token_s=told.references * told.reference_s / load_.tokens,
    )  # fmt: skip
    made = with_references(config, told.references)
    world = World(made.model_copy(update={"rollout": config.rollout.model_copy(update={"count": 1})}), costs, 40)
    seconds = told.step_s if max_lag else told.synchronous_s
    assert 1 / world.run().steps_per_s == pytest.approx(seconds, rel=0.05)
    assert seconds > max(told.train_s, told.generate_s) - 1e-9


def test_where_all_wait_for_the_critic_it_is_named() -> None:
    keys = ["trainer.algorithm.preset=ppo", "rollout.sampling.n=2", "critic.gradient_checkpointing=true"]
    keys += ["critic.offload=true", "gate.max_lag=2"]
    done = CliRunner().invoke(app, ["plan", "configs/grpo-3b.yaml", "--gpus", "8xH100", *keys])
    assert done.exit_code == 0, done.output
    whys = [line for line in done.output.splitlines() if line.startswith("why: ")]
    assert whys and all("the critic takes longest" in why for why in whys), whys


def test_what_the_embedded_engine_keeps_is_counted() -> None:
    """Two versions, and a slot of the longest for each sequence: 147,456 bytes a token."""
    engine = "rollout.engine={{type: torch, max_length: 4096, max_sequences: {}}}"
    many, few = (load(Path("configs/grpo-8b.yaml"), [engine.format(size)]) for size in (256, 64))
    shape = shape_of(few)
    assert shape and embedded_gib(few, shape) == pytest.approx(
        (2 * 16.38e9 + 64 * 4096 * 147456) / 2**30 + 1.5, rel=0.01
    )
    assert not plan(few).problems
    (problem,) = plan(many).problems
    fits = int(problem.rpartition(" ")[2])
    assert plan(load(Path("configs/grpo-8b.yaml"), [engine.format(fits)])).problems == []
    assert "max_sequences=64: GPU 0" in too_much(few, {"rollout-0": "0", "reference-0": "0"}, {"0": 80.0})[0]
    beside = plan(few.model_copy(update={"run": few.run.model_copy(update={"placement": "colocated"})})).problems
    assert "max_sequences=64: beside an engine's" in " ".join(beside)


def test_versions_that_engines_map_are_counted_where_that_is_asked_for() -> None:
    """Three on the GPU of a trainer of one rank, beside the one that is published."""
    path, named, room = Path("configs/grpo-3b.yaml"), "weights.transport=cuda_ipc", "run.gpu_gib=70"
    config = load(path, [named, room])
    shape = shape_of(config)
    assert shape and mapped_gib(config, shape, config.trainer) == pytest.approx(3 * 2 * 3.09e9 / 2**30, rel=0.01)
    (problem,) = plan(config).problems
    assert problem.startswith(f"{named}: ") and problem.endswith("use auto")
    for fits in ([room], [named, room, "trainer.ranks=2"], [named, room, "trainer.lora={rank: 32, publish: adapter}"]):
        assert not plan(load(path, fits)).problems
    share = "rollout.engine.vllm.gpu_memory_utilization=0.82"
    small = [load(Path("configs/grpo-0.5b.yaml"), [share, *more]) for more in ([], [named])]
    assert [len(too_much(each, {"trainer": "0", "rollout-0": "0"}, {"0": 80.0})) for each in small] == [0, 1]


def test_a_deterministic_run_is_counted_as_it_sums_its_gradients() -> None:
    """Micro-batch by micro-batch where nothing else is said: what memory is free decides nothing."""
    path, critic = Path("configs/grpo-3b.yaml"), ["trainer.algorithm.preset=ppo", "rollout.sampling.n=2"]
    full = "{ranks: 8, gradient_checkpointing: false, tokens_per_micro_batch: 14500}"
    given = [f"trainer={full}", *critic, f"critic={full}", "run.gpu_gib=80"]
    refused = [problem.partition("=")[0] for problem in plan(load(path, given)).problems]
    assert refused == ["trainer.ranks", "critic.ranks"]
    config, (count, device) = load(path, [*given, "run.deterministic=true"]), devices_of("18xH100")
    shape = shape_of(config)
    assert shape and not plan(config).problems
    found = [*layouts(config, shape, count, device, Load(1e6, 1e3))]
    assert found and not any(keeps_whole_gradients(layout.trainer, shape, device.gib) for layout in found)


@pytest.mark.parametrize("size", ["quantization=fp8", "kv_cache_dtype=fp8", "kv_cache_memory_bytes=4000000000"])
def test_an_engine_whose_size_is_not_known_is_not_refused(size: str) -> None:
    path, one = Path("configs/grpo-70b.yaml"), "rollout.engine.vllm.tensor_parallel_size=1"
    kept = [one, "rollout.engine.vllm.kv_cache_dtype=auto"]
    assert any("leave no room for one sequence" in problem for problem in plan(load(path, kept)).problems)
    found = plan(load(path, [one, f"rollout.engine.vllm.{size}"]))
    assert not found.problems
    assert any(f"what {size.partition('=')[0]} makes of it is not counted" in line for line in found.lines)


def test_adapters_are_counted_by_the_ends_of_full_names() -> None:
    shape = shape_of(load(Path("configs/grpo-8b.yaml")))
    assert shape
    wanted = shape.layers * 32 * (4096 + 4096)
    assert shape.adapter(32, ["q_proj"]) == shape.adapter(32, ["self_attn.q_proj"]) == wanted
    assert shape.adapter(32, ["mlp.q_proj"]) == shape.adapter(32, ["proj"]) == 0
    assert shape.adapter(32, ["self_attn.q_proj", "q_proj", "up_proj"]) > wanted


def test_gpus_are_given_out_without_overlap() -> None:
    config = load(Path("configs/grpo-8b.yaml"), ["rollout.engine.vllm.tensor_parallel_size=2", "rollout.count=1"])
    assert total_gpus(config) == 7
    placed = place(config, [str(i) for i in range(8)])
    assert placed == {"trainer": "0,1,2,3", "rollout-0": "4,5", "reference-0": "6"}
    with pytest.raises(ConfigError, match="wants 7 GPUs .* there are 6"):
        place(config, [str(i) for i in range(6)])
    assert place(config, []) == {}
    small = load(Path("configs/grpo-0.5b.yaml"))
    assert set(place(small, ["3"]).values()) == {"3"}  # everything shares the only one
    quickstart = load(Path("configs/quickstart.yaml"))
    assert place(quickstart, ["0", "1"]) == {"trainer": "0", "rollout-0": "1", "rollout-1": "0", "reference-0": "1"}
    assert "rollout-0" not in place(load(Path("configs/quickstart.yaml"), ["rollout.engine.device=cpu"]), ["0"])


def test_guests_are_on_the_trainers_gpus() -> None:
    def on(gpus: int, *more: str) -> dict[str, str]:
        config = load(Path("configs/grpo-8b.yaml"), ["run.placement=colocated", *more])
        return place(config, [str(i) for i in range(gpus)])

    two = ["rollout.engine.vllm.tensor_parallel_size=2", "rollout.count=2"]
    placed = {"trainer": "0,1,2,3", "rollout-0": "0,1", "rollout-1": "2,3", "reference-0": "3"}
    assert on(8, *two) == on(4, *two) == placed
    with pytest.raises(ConfigError, match=r"wants 4 GPUs \(trainer 4\), which others share .* are 3"):
        on(3, *two)
    with pytest.raises(ConfigError, match="3 rollouts want 6 GPUs, and trainer.ranks=4 has 4"):
        on(8, two[0], "rollout.count=3")
    assert set(on(1, "trainer.ranks=1", "rollout.count=1").values()) == {"0"}


def test_programs_that_sleep_are_counted_beside_an_engine() -> None:
    """Behind the reference's seat; and as much as they say, while they are awake."""
    keys = ["run.placement=colocated", "trainer.ranks=2", "rollout.count=2", "run.gpu_gib=80"]
    sleeps = "gpus: 1, ready: 'tcp://127.0.0.1:1', sleep: 'http://127.0.0.1:1/s', wake: 'http://127.0.0.1:1/w'"

    def told(*more: str) -> tuple[str, list[str]]:
        found = plan(config := load(Path("configs/grpo-8b.yaml"), [*keys, *more]))
        assert total_gpus(config) == 2 and (not config.sleepers or beds(config, ["0", "1", "2"]) == {"judge": ["0"]})
        return next(line for line in found.lines if line.startswith("at rest")), found.problems

    alone, before = told()
    counted, after = told(f"programs={{judge: {{command: judge, gpu_gib: 70, {sleeps}}}}}")
    unknown, same = told(f"programs={{judge: {{command: judge, {sleeps}}}}}")
    assert "of the reference and the trainer's context" in alone and "the reference and programs.judge and" in counted
    assert before == same and "programs.judge not counted" in unknown
    assert any("gpu_memory_utilization=" in problem and "beside it 71" in problem for problem in after), after


def test_what_cannot_be_counted_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 8, "num_experts": 64}')
    found = plan(load(Path("configs/grpo-8b.yaml"), [f"model.path={tmp_path}"]))
    assert found.lines == ["nothing counted (run.gpu_gib): no config.json at model.path of a decoder that is known"]
