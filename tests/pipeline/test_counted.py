"""What a run holds beside the policy, and how much of it at once: counted from config.json."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.pipeline.cli import app
from penstock.pipeline.config import Config, load
from penstock.pipeline.resources.devices import devices_of
from penstock.pipeline.resources.host import HostNeeds, host_needs
from penstock.pipeline.resources.memory import critic_gib, plan
from penstock.pipeline.resources.model_shape import shape_of
from penstock.pipeline.resources.readers import reference_gib, scorer_gib
from penstock.pipeline.resources.search import unsearched
from penstock.pipeline.resources.shares import too_much
from penstock.pipeline.resources.step_time import rest_s
from penstock.pipeline.resources.trainer_memory import keeps_whole_gradients, trainer_gib, trainer_parts
from penstock.services.runtime.gpu_kinds import device_called

H100 = device_called("NVIDIA H100 80GB HBM3", 80)
LARGE, SMALL = "Qwen/Qwen3-32B", "Qwen/Qwen2.5-0.5B-Instruct"


def test_a_row_that_is_longer_than_a_micro_batch_is_counted_whole() -> None:
    """Of trainer, critic, reference and host: no key but those that make rows shorter helps."""
    ppo = ["trainer.algorithm.preset=ppo", "critic.gradient_checkpointing=true", "trainer.gradient_checkpointing=true"]
    ppo += ["trainer.offload_activations=true", "critic.offload_activations=true"]

    def needs(length: int, tokens: int) -> list[float]:
        keys = [f"rollout.engine.max_length={length}", "run.gpu_gib=80", *ppo]
        keys += [f"{key}={tokens}" for key in ("trainer.tokens_per_micro_batch", "critic.tokens_per_micro_batch")]
        config = load(Path("configs/grpo-8b.yaml"), [*keys, f"reference.tokens_per_batch={tokens}"])
        shape, host = shape_of(config), host_needs(config)
        assert shape and host
        on_gpus = [trainer_gib(shape, config.trainer), critic_gib(config, 80.0), reference_gib(config)]
        return [size or 0.0 for size in on_gpus] + [host.activations, host.critic_activations]

    long, short = needs(32768, 4096), needs(4096, 4096)
    assert long == needs(32768, 32768)
    assert all(more > less for more, less in zip(long, short, strict=True))


def test_a_teacher_of_its_own_is_kept_wherever_the_moments_are() -> None:
    """4 bytes a parameter more: of GPUs, of the host in their place, of copies that are written, and of the disk."""
    per = 4 * 8.19e9 / 2**30
    own = "trainer.algorithm.advantage={type: self_distillation, teacher_rate: "

    def needs(rate: float, *more: str) -> HostNeeds:
        needs = host_needs(load(Path("configs/grpo-8b.yaml"), [f"{own}{rate}}}", "trainer.offload=true", *more]))
        assert needs
        return needs

    one, none = needs(0.05), needs(1.0)
    assert one.offloaded - none.offloaded == pytest.approx(per, rel=0.01)
    assert one.staging - none.staging == pytest.approx(per, rel=0.01)
    assert one.checkpoints - none.checkpoints == pytest.approx(3 * per, rel=0.01)
    shared = ["run.placement=colocated", "trainer.offload=false"]
    assert needs(0.05, *shared).resting - needs(1.0, *shared).resting == pytest.approx(per, rel=0.01)


def test_means_on_the_host_are_counted_there_whether_the_trainer_rests_or_not() -> None:
    """8 bytes a parameter: none on a GPU, and they do not move when GPUs change hands."""
    per = 8 * 8.19e9 / 2**30

    def found(*more: str) -> tuple[float, HostNeeds, float]:
        config = load(Path("configs/grpo-8b.yaml"), [*more])
        shape, needs = shape_of(config), host_needs(config)
        assert shape and needs and H100
        return trainer_gib(shape, config.trainer), needs, rest_s(shape, config.trainer, H100)

    for shared in ([], ["run.placement=colocated"]):
        (plain, before, moving), (spared, after, less) = found(*shared), found(*shared, "trainer.offload=optimizer")
        assert plain - spared == pytest.approx(per / 4, rel=0.01)  # of a rank of four
        assert after.offloaded - before.offloaded == pytest.approx(per, rel=0.01)
        assert before.resting - after.resting == pytest.approx(per if shared else 0, rel=0.01)
        assert moving / less == pytest.approx(3, rel=0.01)
    half = found("trainer.optimizer={type: muon}", "trainer.offload=optimizer")[1].offloaded
    assert 0.5 < half / per < 0.62, "Muon has one, but of embedding and head"


def test_whole_gradients_are_those_of_what_learns() -> None:
    """As the learner decides: an adapter's are small enough wherever there is more than one rank."""
    lora = ["trainer.lora={rank: 64}", "trainer.ranks=8", "run.gpu_gib=80"]
    config = load(Path("configs/grpo-32b.yaml"), [*lora, "trainer.nodes=1"])
    shape = shape_of(config)
    assert shape
    whole = 4 * shape.adapter(64) / 2**30
    each = {
        sums: trainer_parts(shape, config.trainer.model_copy(update={"sum_gradients": sums}), 80.0)["gradients"]
        for sums in ("auto", "step", "micro_batch")
    }
    assert each["auto"] == each["step"] == pytest.approx(whole) and each["micro_batch"] == pytest.approx(whole / 8)
    assert not keeps_whole_gradients(config.trainer.model_copy(update={"lora": None}), shape, 80.0)
    assert not keeps_whole_gradients(config.trainer.model_copy(update={"ranks": 1}), shape, 80.0)


def test_what_is_frozen_has_no_gradient_and_no_state() -> None:
    """12 bytes a parameter, of the ranks and, but for weights that stand still, of the host; a critic is not frozen."""

    def counted(*more: str) -> tuple[float, float, float]:
        keys = ["trainer.ranks=1", "trainer.algorithm.preset=ppo", "rollout.sampling.n=2", *more]
        config = load(Path("configs/grpo-0.5b.yaml"), keys)
        shape, host = shape_of(config), host_needs(config)
        assert shape and host
        return trainer_gib(shape, config.trainer), host.staging, critic_gib(config, 80.0) or 0.0

    ends, layer = 151936 * 896, 2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864
    whole = counted()
    for pattern, still in (("*.layers.?.*", 10 * layer), ("*embed*", ends)):
        less = counted(f"trainer.freeze=['{pattern}']")
        assert whole[0] - less[0] == pytest.approx(12 * still / 2**30, rel=0.02), pattern
        assert whole[1] - less[1] == pytest.approx(8 * still / 2**30, rel=0.02), pattern
        assert less[2] == whole[2]


def test_stages_have_what_is_frozen_of_their_own_layers() -> None:
    config = load(Path("configs/grpo-8b.yaml"), ["trainer.freeze=['*.layers.?.*', '*embed*']"])
    shape = shape_of(config)
    assert shape
    first, last = (shape.stage(number, 2) for number in range(2))
    assert first.frozen == shape.frozen == sum(shape.still) + 151936 * 4096 and last.frozen == 0


def test_what_makes_a_long_row_fit_is_said() -> None:
    keys = ["rollout.engine.max_length=40960", "trainer.algorithm.kl.coefficient=0", "run.gpu_gib=40"]
    (problem,) = plan(
        config := load(Path("configs/grpo-8b.yaml"), [*keys, "trainer.tokens_per_micro_batch=1024"])
    ).problems
    assert "tokens_per_micro_batch" not in problem and "rollout.engine.max_length" in problem
    assert "take trainer.sequence_parallel=2 or a shorter" in problem
    assert any("a row of 40,960 tokens" in line for line in plan(config).lines)


def test_reference_and_critic_are_counted_by_models_of_their_own() -> None:
    kl, ppo = "trainer.algorithm.kl.coefficient=0.001", "trainer.algorithm.preset=ppo"
    for override, key in ((f"reference.path={LARGE}", kl), (f"critic.path={LARGE}", ppo)):
        config = load(Path("configs/grpo-0.5b.yaml"), [override, key, "rollout.sampling.n=2", "run.gpu_gib=40"])
        large = override.partition(".")[0]
        assert [large in problem for problem in plan(config).problems] == [True]
        assert large in unsearched(config, devices_of("8xA100-40")[1])  # type: ignore[operator]
        assert large in too_much(config, {large: "0", "rollout-0": "0"}, {"0": 40.0})[0]
    needs = host_needs(load(Path("configs/grpo-0.5b.yaml"), [f"critic.path={LARGE}", ppo]))
    assert needs and needs.critic == pytest.approx(12 * 32.76e9 / 2**30, rel=0.01)
    assert needs.checkpoints == pytest.approx(3 * (needs.staging + needs.critic))
    config = load(Path("configs/grpo-70b.yaml"), [f"reference.path={SMALL}", kl])
    assert not [problem for problem in plan(config).problems if "reference" in problem]
    cut = [f"reference.path={LARGE}", kl, "run.gpu_gib=40"]
    (problem,) = plan(load(Path("configs/grpo-0.5b.yaml"), cut)).problems
    assert "do not fit a GPU of 40 GiB; set reference.gpus=2, or the coefficient to 0, or take a smaller" in problem
    assert not plan(load(Path("configs/grpo-0.5b.yaml"), [*cut, "reference.gpus=2"])).problems
    apart = [
        reference_gib(load(Path("configs/grpo-0.5b.yaml"), [kl, f"reference.gpus={gpus}"])) or 0.0 for gpus in (1, 2)
    ]
    head, layers = 151936 * 896 * 2 / 2**30, 24
    weights = 494.03e6 * 2 / 2**30
    expected = (weights + head) / 2 + (weights + head) / layers - weights
    assert apart[1] - apart[0] == pytest.approx(expected, abs=0.02), "the head, which is the embedding, is there twice"
    config = load(Path("configs/grpo-0.5b.yaml"), ["reference.path=no/such-model", kl])
    assert not plan(config).problems and reference_gib(config) is None, "its sizes are not known here"


def test_who_is_not_counted_is_named() -> None:
    """In the plan, beside layouts, and where GPUs are shared."""
    keys = ["trainer.algorithm.preset=ppo", "rollout.sampling.n=2", "reference.path=no/such", "critic.path=no/other"]
    keys += [
        "scorers={mine: {scorer: 'a:B', columns: {mine: token}, gpus: 1}, free: {scorer: 'a:B', columns: {f: token}}}"
    ]
    config = load(Path("configs/grpo-8b.yaml"), keys)
    (told,) = [line for line in plan(config).lines if line.startswith("not counted: ")]
    assert "reference (no config.json of no/such here" in told and "critic (no config.json of no/other here" in told
    assert "scorers.mine (a class of your own)" in told and "free" not in told
    shared = load(Path("configs/grpo-8b.yaml"), [keys[2], "run.placement=colocated", "trainer.ranks=4"])
    assert any("(the reference not counted)" in line for line in plan(shared).lines)
    shown = CliRunner().invoke(app, ["plan", "configs/grpo-8b.yaml", keys[2], "--gpus", "8xH100"]).output
    assert "in all of these: not counted: reference (no config.json of no/such" in " ".join(shown.split())
    assert not any("not counted" in line for line in plan(load(Path("configs/grpo-8b.yaml"))).lines)


@pytest.mark.parametrize("scorer", ["teacher", "reward_model"])
def test_built_in_scorers_with_gpus_are_counted_by_their_models(scorer: str) -> None:
    per, column = ("token", "teacher") if scorer == "teacher" else ("trajectory", "preference")
    base = f"{{scorer: {scorer}, columns: {{{column}: {per}}}, options: {{path: {LARGE}}}"

    def judged(more: str = "", room: int = 80) -> Config:
        keys = [f"scorers={{judge: {base}{more}}}}}", f"run.gpu_gib={room}"]
        return load(Path("configs/grpo-0.5b.yaml"), keys)

    config = judged(", gpus: 1")
    weights = 2 * (32.76e9 - 151936 * 5120 * (scorer == "reward_model")) / 2**30
    assert scorer_gib(config, "judge") == pytest.approx(
        weights + 1.5 + 2 * 8192 * (8 * 5120 + 3 * 25600) / 2**30, rel=0.01
    )
    assert any(line.startswith("judge: 1 x ") for line in plan(config).lines) and not plan(config).problems
    assert scorer_gib(judged(), "judge") is None, "it has no GPU"
    (alone,) = plan(small := judged(", gpus: 1", 40)).problems
    assert alone.startswith("scorers.judge.options.path: ")
    assert alone.endswith("; set scorers.judge.gpus=2, or take a smaller model")
    assert not plan(judged(", gpus: 2", 40)).problems
    assert any("on each of 2 GPUs" in line for line in plan(judged(", gpus: 2", 40)).lines)
    (problem,) = plan(judged(", gpus: 2", 20)).problems
    assert "GiB on each of 2 GPUs do not fit a GPU of 20 GiB; set scorers.judge.gpus=4, or" in problem
    problem = next(each for each in plan(judged(", gpus: 8", 8)).problems if each.startswith("scorers.judge"))
    assert "8 GiB; take a smaller model" in problem, "a machine has no more"
    assert unsearched(small, devices_of("8xA100-40")[1]) == alone
    assert too_much(config, {"judge-0": "0", "rollout-0": "0"}, {"0": 80.0})
