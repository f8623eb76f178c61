"""Every built-in method lifts the quickstart's reward. A minute each: `make learning`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

from penstock.pipeline.config import TinyModel
from penstock.pipeline.models.tiny import build
from penstock.pipeline.run.summary import steps_of
from penstock.services.data import open_source
from penstock.services.data.config import SortData
from tests.e2e.runs import ROOT, Run, check_promises

pytestmark = [pytest.mark.learning, pytest.mark.timeout(600)]
TENSOR, SEQUENCE = ([f"trainer.{kind}_parallel=2", "trainer.ranks=2"] for kind in ("tensor", "sequence"))
ALONE = ["trainer.lora={rank: 16, publish: adapter}"]
MUON = ["trainer.optimizer.type=muon"]
PLAIN = ["loss={type: reinforce}", "correction={type: truncated}"]
METHODS = {
    "dapo": ["loss={type: ppo_clip, clip_high: 0.28}"],
    "dr_grpo": ["advantage={type: grpo, std: false}", "aggregation=seq-mean-token-sum-norm", "length_scale=12"],
    "remax": ["advantage={type: remax}"],
    "rae": ["advantage={type: rae}"],
    "spo": ["preset=spo"],
    "rloo": ["advantage={type: rloo}"],
    "reinforce_plus_plus": ["advantage={type: reinforce_plus_plus}"],
    "reinforce_plus_plus_baseline": ["advantage={type: reinforce_plus_plus_baseline}"],
    "optimal_token_baseline": ["advantage={type: optimal_token_baseline}", *PLAIN],
    "opo": ["advantage={type: opo}", *PLAIN],
    "gpg": ["advantage={type: gpg}", *PLAIN],
    "maxrl": ["advantage={type: maxrl}"],
    "gspo": ["loss={type: gspo}"],
    "cispo": ["loss={type: cispo}"],
    "sapo": ["loss={type: sapo}"],
    "gmpo": ["loss={type: geo_mean}"],
    "dppo": ["loss={type: dppo_tv}"],
    "clip_cov": ["loss={type: clip_cov}"],
    "kl_cov": ["loss={type: kl_cov}"],
    "gdpo": ["advantage={type: gdpo, components: {reward/exact_match: 1.0}}"],
    "dro": ["loss={type: dro}"],
    "icepop": ["loss={type: reinforce}", "correction={type: icepop}"],
    "a3po": ["ratio=interpolated", "correction={type: truncated}"],
    "luspo": ["preset=luspo", "loss=null"],
    "m2po": ["loss={type: m2po}"],
    "online_dpo": ["preset=online_dpo", "loss=null"],
    "gvpo": ["preset=gvpo", "loss=null", "aggregation=null"],
    "sppo": ["preset=sppo", "loss={type: sppo, eta: 3.0}"],
    "subset": ["subset={keep: 4}"],
    "topr": ["loss={type: topr}"],
    "vespo": ["loss={type: vespo}"],
    "undecided": ["entropy_share=0.2"],
    "lite_ppo": ["advantage={type: grpo, std: step}"],
    "imitation": ["imitate={coefficient: 0.1}"],
    "clip_by_age": ["loss={type: ppo_clip, lag_exponent: 0.5}"],
}


@pytest.mark.parametrize("chosen", [[], ["preset=vapo", "advantage.length_alpha=1.0"]], ids=["ppo", "vapo"])
def test_ppo_with_a_critic_lifts_the_reward(chosen: list[str], tmp_path: Path) -> None:
    given = [f"trainer.algorithm.{choice}" for choice in chosen]
    summary = Run(tmp_path, given, ROOT / "configs" / "ppo.yaml").wait(500)
    check_promises(summary)
    assert summary["reward_last"] >= 0.85 and summary["eval_after"] >= 0.95


def test_prime_lifts_the_reward_and_knows_which_answers_are_right(tmp_path: Path) -> None:
    run = Run(tmp_path, [], ROOT / "configs" / "prime.yaml")
    summary = run.wait(500)
    check_promises(summary)
    assert summary["reward_last"] >= 0.9 and summary["eval_after"] >= 0.95
    known = [row["critic_accuracy"] for row in steps_of(run.folder) if "critic_accuracy" in row]
    assert sum(known[-20:]) / 20 >= 0.95


@pytest.mark.parametrize("preset", ["grpo", "gigpo"])
def test_a_task_of_two_turns_with_a_tool_is_learned(preset: str, tmp_path: Path) -> None:
    chosen = [f"trainer.algorithm.preset={preset}"]
    summary = Run(tmp_path, chosen, ROOT / "examples" / "own-environment" / "config.yaml").wait(500)
    check_promises(summary)
    assert summary["reward_first"] <= 0.1 and summary["reward_last"] >= 0.85


def test_an_environment_as_a_service_is_learned(tmp_path: Path) -> None:
    free = ["gateway.http=127.0.0.1:0", "gateway.bind=tcp://127.0.0.1:0", "gateway.tool_calls=none"]
    run = Run(tmp_path, free, ROOT / "configs" / "agent.yaml")
    play = [sys.executable, "-m", "penstock.pipeline.cli", "play", str(run.folder), "my_env:Hidden"]
    played = subprocess.Popen(
        [*play, "-o", "max_turns=2", "--sessions", "128"], cwd=ROOT / "examples" / "own-environment"
    )
    try:
        summary = run.wait(500)
        assert played.wait(60) == 0, "it ends with the run"
    finally:
        played.kill()
    check_promises(summary)
    assert summary["reward_first"] <= 0.1 and summary["reward_last"] >= 0.85


def test_answers_are_kept_as_short_as_a_constraint_wants_them(tmp_path: Path) -> None:
    """A reward for length with falling returns: without a limit the longest answer is the best one."""
    functions = '[{function: "tests.e2e.rewards:plenty"}, {function: length, weight: 0}]'
    limit = "[{column: reward/length, limit: 6.0, initial: 0.02, rate: 0.02}]"
    chosen = ["advantage={type: rloo}", f"constraints={limit}"]
    run = Run(tmp_path, [f"reward.functions={functions}", *(f"trainer.algorithm.{choice}" for choice in chosen)])
    check_promises(run.wait(500))
    last = steps_of(run.folder)[-50:]
    assert 5.0 <= mean(row["reward/length"] for row in last) <= 7.0
    worth = (1 / 12 / 6) ** 0.5 / 2  # what a token more earns at the limit
    assert 0.5 * worth <= mean(row["multiplier/reward/length"] for row in last) <= 2 * worth


def test_a_teacher_is_caught_up_with_and_sooner_by_its_whole_distribution(tmp_path: Path) -> None:
    for name in ("teacher", "policy", "whole", "policy-of-few", "whole-of-few"):
        (tmp_path / name).mkdir()
    teacher = Run(tmp_path / "teacher", ["trainer.steps=100"])
    assert teacher.wait(500)["reward_last"] >= 0.9
    path = teacher.folder / "checkpoints" / "step-000100"
    told = f"{{scorer: teacher, columns: {{teacher: token}}, options: {{path: {path}, dtype: float32, top_k: 8}}}}"
    found = []
    for name, where, preset in (
        ("policy", f"reference.path={path}", "distillation"), ("whole", f"scorers={{teacher: {told}}}", "gkd"),
    ):  # fmt: skip
        chosen = [f"trainer.algorithm.{choice}" for choice in (f"preset={preset}", "loss=null", "kl.coefficient=0")]
        run = Run(tmp_path / name, [where, "trainer.steps=60", *chosen])
        summary = run.wait(500)
        check_promises(summary)
        assert summary["reward_first"] <= 0.3 and summary["reward_last"] >= 0.85
        few = ["rollout.sampling.n=1", "gate.groups_per_step=8", "gate.prefetch=8"]  # where a sampled token says little
        again = Run(tmp_path / f"{name}-of-few", [where, "trainer.steps=60", *chosen, *few])
        again.wait(500)
        found.append(mean(row["reward"] for row in steps_of(again.folder)))
    assert found[1] >= found[0] + 0.05


def test_a_policy_that_can_read_a_good_answer_teaches_itself(tmp_path: Path) -> None:
    """SDPO: the model begins as one that copies an answer which is shown, and without one rarely sorts."""
    random = np.random.default_rng(0)
    plain = [prompt for _, prompt in zip(range(2000), open_source(SortData()), strict=False)]
    mixed = ["".join(random.permutation(list(p.truth))) for p in plain]
    asked = [p.model_copy(update={"truth": mixed[i]}) if i % 4 else p for i, p in enumerate(plain)]
    shown = [p.model_copy(update={"text": f"{p.truth}:{p.text}"}) for p in plain]
    tiny = TinyModel.model_validate({"warm_start": {"steps": 400, "corrupted": 0.0}})
    build(tiny, [*asked, *shown], tmp_path / "model", 0)
    chosen = ["preset=sdpo", 'advantage.template="{solution}:{prompt}"', "kl.coefficient=0", "loss=null"]
    model = [f"model={{type: pretrained, path: {tmp_path / 'model'}, dtype: float32}}"]
    steps = ["trainer.steps=50", "trainer.checkpoint.every=20"]
    run = Run(tmp_path, [*model, *steps, *(f"trainer.algorithm.{choice}" for choice in chosen)])
    summary = run.wait(500)
    check_promises(summary)
    assert summary["reward_first"] <= 0.4 and summary["reward_last"] >= 0.9


@pytest.mark.parametrize(
    "shape",
    [["trainer.lora.rank=16"], ["trainer.ranks=2"], TENSOR, SEQUENCE, ["trainer.lora.variant=dora"], ALONE, MUON],
)
def test_an_adapter_two_ranks_and_muon_learn_as_well(shape: list[str], tmp_path: Path) -> None:
    rate = ["trainer.optimizer.lr=3e-3"] if "lora" in shape[0] else []
    run = Run(tmp_path, [*shape, *rate])
    summary = run.wait(500)
    check_promises(summary)
    assert summary["reward_last"] >= 0.85 and summary["eval_after"] >= 0.95


@pytest.mark.parametrize("method", METHODS)
def test_the_reward_rises(method: str, tmp_path: Path) -> None:
    run = Run(tmp_path, [f"trainer.algorithm.{choice}" for choice in METHODS[method]])
    summary = run.wait(500)
    check_promises(summary)
    assert summary["reward_last"] >= 0.85
