"""Runs in virtual time: the broker's rules hold in every world, and times are those that can be worked out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from penstock.pipeline.cli import app
from penstock.pipeline.config import Config, dump, load
from penstock.pipeline.resources.devices import devices_of
from penstock.pipeline.resources.loads import half_of_the_longest, load_of, longest_response
from penstock.pipeline.resources.model_shape import shape_of
from penstock.pipeline.resources.search import layouts
from penstock.pipeline.simulate.calibrate import like
from penstock.pipeline.simulate.costs import Costs, of_file, on_gpus
from penstock.pipeline.simulate.world import StuckError, World

QUICKSTART, BIG = Path("configs/quickstart.yaml"), Path("configs/grpo-8b.yaml")


def config(**changes: Any) -> Config:
    keys = {"rollout.engine.max_length": 4096, "rollout.sampling.max_new_tokens": 4000, "gate.prefetch": "null"}
    return load(QUICKSTART, [f"{key}={value}" for key, value in (keys | changes).items()])


def alike(**changes: Any) -> Costs:
    """Every response has 100 tokens, of 10 ms each."""
    return Costs(length=100, length_spread=0, decode_s=0.01, train_token_s=0, reward_spread=0).model_copy(
        update=changes
    )


def in_one_go(max_lag: int = 0, **changes: Any) -> Config:
    """A step is what one rollout decodes at once."""
    keys = {"gate.groups_per_step": 4, "rollout.sampling.n": 2, "rollout.count": 1, "rollout.engine.max_sequences": 8}
    return config(**(keys | {"gate.max_lag": max_lag, "trainer.algorithm.kl.coefficient": 0} | changes))


def test_a_synchronous_run_takes_what_its_parts_take() -> None:
    """One second of decoding, half a second until all are rewarded, a quarter to train 800 tokens, and to publish."""
    costs = alike(reward_s=0.5, train_token_s=0.25 / 800, publish_s=0.2, pause_s=0.05)
    found = World(in_one_go(), costs, 20).run()
    assert found.steps_per_s == pytest.approx(1 / 2.0, rel=0.01)
    assert found.trainer_busy == pytest.approx(0.25 / 2.0, rel=0.02) and found.lag_max == 0
    assert found.rollouts_busy == pytest.approx(1 / 2.0, rel=0.05)
    assert found.tokens_per_s == pytest.approx(800 / 2.0, rel=0.1)


def test_with_lag_the_slowest_part_is_what_a_step_takes() -> None:
    found = World(in_one_go(max_lag=4), alike(reward_s=1.5, train_token_s=0.9 / 800), 60).run()
    assert found.steps_per_s == pytest.approx(1.0, rel=0.03), "a second of decoding: training and rewards are hidden"
    slow = World(in_one_go(max_lag=4), alike(train_token_s=3 / 800), 60).run()
    assert slow.steps_per_s == pytest.approx(1 / 3, rel=0.03) and slow.trainer_busy > 0.95


def test_who_shares_devices_takes_turns() -> None:
    """However large the lag: a second of decoding, 0.9 of training, a tenth to change hands."""
    keys = {"run.placement": "colocated"}
    costs = alike(train_token_s=0.9 / 800, switch_s=0.1)
    for lag in (0, 4):
        found = World(in_one_go(max_lag=lag, **keys), costs, 60).run()
        assert found.steps_per_s == pytest.approx(1 / 2.0, rel=0.03) and found.lag_max <= 1
    waits = World(in_one_go(max_lag=4, **keys), alike(train_token_s=0.4 / 800, reward_s=1.5), 60).run()
    assert waits.steps_per_s == pytest.approx(1 / 1.4, rel=0.05), "what waits is hidden all the same"


@pytest.mark.parametrize(("references", "ranks"), [(1, 1), (2, 1), (2, 2)])
def test_a_reference_that_shares_devices_takes_its_turn_too(references: int, ranks: int) -> None:
    """A second of decoding, 0.9 of training, and 0.8 of scoring in between, by as many as there are GPUs."""
    keys = {"run.placement": "colocated", "reference.count": references, "trainer.ranks": ranks}
    keys["trainer.algorithm.kl.coefficient"] = 0.001
    costs = alike(train_token_s=0.9 / 800, score_token_s=0.8 * min(references, ranks) / 800)
    for lag in (0, 4):
        found = World(in_one_go(max_lag=lag, **keys), costs, 60).run()
        if ranks == 1:
            assert found.steps_per_s == pytest.approx(1 / 2.7, rel=0.05), (lag, found)
        assert found.steps_per_s <= 1.02 / 1.9


def test_a_critic_gives_values_before_the_trainer_begins_and_learns_beside_it() -> None:
    """A second of decoding, 0.4 for values, 0.25 to train; learning is hidden unless it is what takes longest."""
    ppo = {"trainer.algorithm.preset": "ppo"}
    times = {"critic_values_token_s": 0.4 / 800, "train_token_s": 0.25 / 800}

    def steps_per_s(max_lag: int, learns_s: float) -> float:
        found = World(in_one_go(max_lag, **ppo), alike(**times, critic_train_token_s=learns_s / 800), 60).run()
        assert found.others_busy["critic"] == pytest.approx((0.4 + learns_s) * found.steps_per_s, rel=0.03)
        return found.steps_per_s

    assert steps_per_s(0, 0.9) == pytest.approx(1 / 1.65, rel=0.02)
    assert steps_per_s(0, 3.0) == pytest.approx(1 / 3.4, rel=0.02)
    assert steps_per_s(4, 0.3) == pytest.approx(1.0, rel=0.03), "all of it behind decoding"
    assert steps_per_s(4, 1.2) == pytest.approx(1 / 1.6, rel=0.03)


@pytest.mark.parametrize(("own", "seconds"), [(False, 1 + 0.4 + 0.9 + 0.25), (True, 0.4 + 0.25 + 1)])
def test_a_critic_on_the_trainers_devices_keeps_rollouts_from_them(own: bool, seconds: float) -> None:
    """With GPUs of its own it learns beside all others, and its values come while rollouts decode the next step."""
    keys = {"trainer.algorithm.preset": "ppo", "run.placement": "colocated", "critic.own_gpus": own}
    times = {"critic_values_token_s": 0.4 / 800, "critic_train_token_s": 0.9 / 800, "train_token_s": 0.25 / 800}
    found = World(in_one_go(0, **keys), alike(**times), 60).run()
    assert found.steps_per_s == pytest.approx(1 / seconds, rel=0.03)


@pytest.mark.parametrize("preset", ["ppo", "grpo"])
def test_who_may_generate_one_step_ahead_does_so_as_soon_as_a_step_is_taken(preset: str) -> None:
    """A second of decoding, and one until the step is trained, beside each other."""
    keys = {"trainer.algorithm.preset": preset, "gate.prefetch": 4}
    times = {"critic_values_token_s": 0.8 / 800, "train_token_s": 0.15 / 800}
    if preset == "grpo":
        times = {"train_token_s": 0.95 / 800}
    found = World(in_one_go(4, **keys), alike(**times), 60).run()
    assert found.steps_per_s == pytest.approx(1.0, rel=0.03)


def test_lengths_have_the_mean_that_was_asked_for_and_seen_ones_are_what_they_were() -> None:
    random = np.random.default_rng(0)
    drawn = Costs(length=1536, length_spread=0.8).draw_lengths(random, 200_000, 3072)
    assert drawn.max() == 3072 and drawn.mean() == pytest.approx(1536, rel=0.01)
    assert set(Costs(length=1, lengths=(5000, 9)).draw_lengths(random, 50, 3072).tolist()) == {3072, 9}
    assert set(Costs(length=4000).draw_lengths(random, 50, 3072).tolist()) == {3072}


def test_turns_make_longer_responses() -> None:
    """Four of 64 tokens, where the engine has room for them."""
    keys = {"rollout.environment": "{environment: 'my:Guess', max_turns: 4}", "rollout.sampling.max_new_tokens": 64}
    for room, new, longest in ((4096, 64, 256), (200, 64, 200), (128, "null", 128)):
        made = in_one_go(**{**keys, "rollout.engine.max_length": room, "rollout.sampling.max_new_tokens": new})
        assert (longest_response(made), half_of_the_longest(made)) == (longest, longest // 2)
        found = World(made, alike(length=1000), 20).run()
        assert found.steps_per_s == pytest.approx(1 / (longest * 0.01), rel=0.03)


def test_given_answers_are_trained_on_and_not_generated() -> None:
    """Half of the answers: an engine with room for the others decodes these in a second; training takes as long as
    that of all."""
    given = {"rollout.sampling.n": 4, "rollout.given.answers": 2, "rollout.groups_in_flight": 4}
    found = World(in_one_go(**given), alike(train_token_s=0.5 / 1600), 20).run()
    assert found.steps_per_s == pytest.approx(1 / 1.5, rel=0.03)
    config, (count, device) = load(BIG, ["rollout.given.answers=4"]), devices_of("8xH100")
    shape = shape_of(config)
    assert shape
    half, whole = (load_of(load(BIG, keys), 1000) for keys in (["rollout.given.answers=4"], []))
    assert half.tokens == whole.tokens and half.given == whole.tokens / 2
    one, two = (next(layouts(config, shape, count, device, each)) for each in (half, whole))
    assert one.train_s == two.train_s and one.generate_s < 0.7 * two.generate_s


@pytest.mark.parametrize(("told", "seconds"), [(", max_sequences: 4", 2.0), (", max_sequences: 8", 1.0), ("", 1.0)])
def test_a_server_over_http_decodes_as_many_as_it_is_told(told: str, seconds: float) -> None:
    """Eight sequences of a second."""
    server = f"{{type: plugin, name: openai, options: {{url: x, folder: /dev/shm/x, max_length: 4096{told}}}}}"
    keys = {"gate.groups_per_step": 4, "rollout.sampling.n": 2, "rollout.count": 1, "gate.max_lag": 0}
    keys |= {"rollout.sampling.max_new_tokens": 4000, "gate.prefetch": "null", "trainer.algorithm.kl.coefficient": 0}
    made = load(QUICKSTART, [f"{key}={value}" for key, value in {"rollout.engine": server, **keys}.items()])
    assert World(made, alike(), 20).run().steps_per_s == pytest.approx(1 / seconds, rel=0.03)


def test_cores_are_shared() -> None:
    """Two who compute all the time on one core take twice as long."""
    costs = alike(train_token_s=1 / 800)
    alone, shared = (World(in_one_go(max_lag=4), costs.model_copy(update={"cores": c}), 40).run() for c in (2, 1))
    assert alone.steps_per_s / shared.steps_per_s == pytest.approx(2.0, rel=0.06)


def test_more_sequences_decode_slower() -> None:
    costs = alike(decode_s=0.002, decode_sequence_s=0.001)
    assert World(in_one_go(), costs, 10).run().steps_per_s == pytest.approx(1.0, rel=0.03)


def test_rollouts_that_die_before_they_answer_end_the_run() -> None:
    with pytest.raises(StuckError, match="rollout_lives_s"):
        World(in_one_go(), alike(decode_s=1.0, rollout_lives_s=2.0), 5).run()


def test_what_is_on_its_way_holds_up_what_comes_next() -> None:
    """A version takes ten seconds to a rollout: of steps of one second most are never served."""
    found = World(in_one_go(max_lag=30), alike(publish_s=10.0), 60).run()
    assert found.lag_mean > 8 and found.lag_max <= 30


@settings(max_examples=20, deadline=None)
@given(
    max_lag=st.integers(0, 5), rollouts=st.integers(1, 6), batch=st.integers(1, 12), window=st.integers(1, 6),
    prefetch=st.one_of(st.none(), st.integers(1, 20)), spread=st.floats(0, 2), reward_s=st.floats(0, 20),
    publish_s=st.floats(0, 5), lives=st.one_of(st.none(), st.floats(20, 200)), seed=st.integers(0, 1 << 30),
    colocated=st.booleans(), critic=st.booleans(),
)  # fmt: skip
def test_in_every_world_the_bound_holds_and_nothing_stalls(
    max_lag: int, rollouts: int, batch: int, window: int, prefetch: int | None, spread: float, reward_s: float,
    publish_s: float, lives: float | None, seed: int, colocated: bool, critic: bool,
) -> None:  # fmt: skip
    window = min(window, max_lag * batch + 1)
    keys = {"gate.max_lag": max_lag, "gate.groups_per_step": batch, "gate.window": window, "rollout.count": rollouts}
    keys |= {"gate.prefetch": prefetch or "null", "rollout.engine.max_sequences": 8, "trainer.checkpoint.every": 3}
    keys["run.placement"] = "colocated" if colocated else "as_given"
    if critic:
        keys["trainer.algorithm.preset"] = "ppo"
    made = config(**keys, **{"rollout.sampling.n": 2})
    costs = Costs(
        length=50, length_spread=spread, reward_s=reward_s, publish_s=publish_s, pause_s=0.1, start_s=3.0,
        rollout_lives_s=lives, trainer_lives_s=lives, score_token_s=1e-3, critic_values_token_s=1e-3,
        critic_train_token_s=5e-3,
    )  # fmt: skip
    found = World(made, costs, 12, seed).run()
    assert found.steps == 12 and -1e-9 <= found.lag_mean <= found.lag_max + 1e-9 <= max_lag + 1e-8


def test_the_command_compares_and_its_costs_can_be_kept(tmp_path: Path) -> None:
    file = tmp_path / "costs.yaml"
    call = ["simulate", "configs/grpo-8b.yaml", "--gpus", "H100", "--steps", "6", "--vary", "gate.max_lag=0,2"]
    done = CliRunner().invoke(app, [*call, "--save", str(file), "--cost", "reward_s=4"])
    assert done.exit_code == 0, done.output
    assert "1.00x" in done.output and of_file(file).reward_s == 4
    again = CliRunner().invoke(app, ["simulate", "configs/grpo-8b.yaml", "--costs", str(file), "--steps", "6"])
    assert again.exit_code == 0, again.output
    call = ["simulate", "configs/grpo-8b.yaml", "--gpus", "H100", "--steps", "6", "--cost", "cores=null"]
    done = CliRunner().invoke(app, [*call, "--vary", "trainer.ranks=4,16"])
    first, second = [line.split() for line in done.output.splitlines() if line.split()[:1] in (["4"], ["16"])]
    assert float(first[1]) > float(second[1]), "costs follow what is varied"


def test_several_engines_of_a_rollout_decode_more_and_stages_need_less_memory() -> None:
    def on(**options: Any) -> Costs:
        engine = f"rollout.engine.vllm={json.dumps({'tensor_parallel_size': 1, **options})}"
        made = load(Path("configs/grpo-8b.yaml"), [engine])
        shape = shape_of(made)
        assert shape
        return on_gpus(made, shape, devices_of("1xA100-40")[1], 1500, 256)

    one, two, staged = on(), on(data_parallel_size=2), on(pipeline_parallel_size=2)
    assert one.most_sequences and two.most_sequences and staged.most_sequences
    assert two.most_sequences == 2 * one.most_sequences and staged.most_sequences > 2.5 * one.most_sequences
    assert two.decode_s == staged.decode_s == one.decode_s, "all weights are read for each token"
    for several in (two, staged):
        assert several.decode_sequence_s == pytest.approx(one.decode_sequence_s / 2)
        assert several.prefill_token_s == pytest.approx(one.prefill_token_s / 2)
    assert staged.pause_s == pytest.approx(one.pause_s / 2)
    assert (on(gpu_memory_utilization=0.6).most_sequences or 0) < one.most_sequences


def test_fewer_gpus_than_the_run_wants_are_said() -> None:
    call = ["simulate", "configs/grpo-8b.yaml", "--steps", "2", "--gpus"]
    for gpus, says in (("2xH100", "the run wants 8 GPUs"), ("8xH100", ""), ("H100", "")):
        done = CliRunner().invoke(app, [*call, gpus])
        assert done.exit_code == 0 and bool(says) == ("warning" in done.stderr) and says in done.stderr


def test_what_is_not_known_of_an_engine_is_not_refused() -> None:
    engine = "rollout.engine.vllm={tensor_parallel_size: 1, gpu_memory_utilization: 0.5, quantization: fp8}"
    done = CliRunner().invoke(app, ["simulate", "configs/grpo-8b.yaml", "--gpus", "L4", "--steps", "2", engine])
    assert done.exit_code == 0, done.output


def test_an_adapter_that_is_published_alone_arrives_sooner() -> None:
    def published(publish: str) -> float:
        made = load(Path("configs/grpo-8b.yaml"), [f"trainer.lora={{rank: 32, publish: {publish}}}"])
        shape = shape_of(made)
        assert shape
        return on_gpus(made, shape, devices_of("1xH100")[1], 1500, 256).publish_s

    assert published("adapter") == pytest.approx(published("merged") * 4 * 87.3e6 / (2 * 8.19e9), rel=0.01)


def test_deterministic_runs_decode_each_group_alone() -> None:
    """Four groups of a second, one after the other."""
    found = World(in_one_go(**{"run.deterministic": "true"}), alike(), 10).run()
    assert found.steps_per_s == pytest.approx(1 / 4, rel=0.03)


@pytest.mark.parametrize("stood_s", [0.0, 3600.0])
def test_a_run_is_as_fast_as_it_was_while_it_was_at_work(tmp_path: Path, stood_s: float) -> None:
    """Steps of a second, of 100 tokens each sequence; between two of them the run was down for an hour."""
    made = in_one_go()
    (tmp_path / "config.yaml").write_text(dump(made))
    step = {"kind": "step", "tokens": 800, "response_tokens": 100, "train_step_s": 0.2}
    times = [number + stood_s * (number > 9) for number in range(20)]
    rows = [json.dumps(step | {"step": number, "time": time}) for number, time in enumerate(times)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    warned: list[str] = []
    found = like(tmp_path, warned.append)
    assert World(made, found, 40).run().steps_per_s == pytest.approx(1.0, rel=0.05)
    assert 1e-4 < found.decode_s < 1e-2 and not warned
    slow = [json.dumps(step | {"step": number, "time": number, "train_step_s": 2.0}) for number in range(20)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(slow))
    like(tmp_path, warned.append)
    assert "however long decoding took, the simulated run is slower than the real one's 1 steps" in warned[0]


def test_values_may_have_commas_of_their_own() -> None:
    engines = "{type: torch, max_length: 4096},{type: torch, max_length: 8192, max_sequences: 64}"
    call = ["simulate", "configs/grpo-8b.yaml", "--gpus", "H100", "--steps", "2", "--vary", f"rollout.engine={engines}"]
    done = CliRunner().invoke(app, call)
    assert done.exit_code == 0 and "{type: torch, max_length: 8192" in done.output, done.output


def test_values_are_no_markup() -> None:
    targets = "[q_proj],[v_proj]"
    given = ["trainer.lora={rank: 4}", "--vary", f"trainer.lora.targets={targets}"]
    done = CliRunner().invoke(app, ["simulate", "configs/grpo-8b.yaml", "--gpus", "H100", "--steps", "2", *given])
    assert done.exit_code == 0 and "[q_proj]" in done.output and "[v_proj]" in done.output, done.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [([], "one of --like RUN"), (["--gpus", "T1000"], "T1000"), (["--gpus", "H100", "--cost", "reward=4"], "reward"),
     (["--gpus", "H100", "--cost", "decode_s=-1"], "decode_s"), (["--costs", "no.yaml"], "no.yaml"),
     (["--gpus", "H100", "--length", "0"], "length"), (["--gpus", "H100", "--save", "no/such/costs.yaml"], "--save"),
     (["--gpus", "H100", "--vary", "gate"], "KEY=VALUE"),
     (["--gpus", "H100", "--cost", "length={a"], "--cost length: '{a' is no value: "),
     (["--gpus", "H100", "--length", "nan"], "--length nan --prompt 256: these are no numbers of tokens"),
     (["--gpus", "H100", "--prompt", "inf"], "--prompt inf: these are no numbers of tokens"),
     (["--gpus", "L4", "rollout.engine.vllm={tensor_parallel_size: 1, gpu_memory_utilization: 0.5}"],
      "1 x L4 of 22.4 GiB have no room for a sequence beside"),
     (["--gpus", "L4", "rollout.engine={type: torch, max_length: 4096}"], "1 x L4 of 22.4 GiB have no room")],
)  # fmt: skip
def test_what_it_cannot_take_is_named(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["simulate", "configs/grpo-8b.yaml", "--steps", "2", *arguments])
    assert done.exit_code and says in done.output + str(done.exception)
