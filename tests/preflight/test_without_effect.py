"""Choices of an algorithm that undo each other, and functions of one's own beside any other choice."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.pipeline.config import Config, load
from penstock.pipeline.preflight import algorithm
from penstock.pipeline.preflight.report import Report

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
CORRECTED = ("trainer.algorithm.ratio=proximal", "trainer.algorithm.correction={type: truncated}")
GSPO, BFLOAT16 = "trainer.algorithm={preset: gspo}", "model.dtype=bfloat16"


def quickstart(*overrides: str) -> Config:
    return load(QUICKSTART, list(overrides))


def looked_at(*overrides: str) -> Report:
    report = Report()
    algorithm.look(quickstart(*overrides), report)
    return report


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ("{loss: {type: m2po}, ratio: proximal}", "ratio=proximal: loss=m2po goes by how far"),
        ("{kl: {coefficient: 0.1, kind: k1}}", "its own gradient is 0 in the mean"),
        ("{kl: {coefficient: 0.1, kind: k1, gradient: k2}}", ""),
        ("{kl: {coefficient: 0.1, place: reward}}", ""),
        ("{loss: {type: geo_mean}, ratio: proximal, correction: {type: icepop}}", "icepop: it leaves out tokens"),
        ("{loss: {type: geo_mean}, ratio: proximal, correction: {type: icepop, level: sequence}}", ""),
        ("{router_balance: 0.001}", "there are no experts; set model.experts"),
        ("{reject: [{kind: seq_mean_k1, upper: 0.5}]}", "e.g. 1.649 where 0.5 nats are meant"),
        ("{reject: [{kind: seq_sum_k1, lower: 1.1, upper: 2}]}", "set lower below 1, e.g. 0.3329 where 1.1 nats"),
        ("{reject: [{kind: seq_mean_k1, lower: 0.8, upper: 1.1}, {kind: seq_mean_k3, upper: 0.01}]}", ""),
    ],
)
def test_what_undoes_another_choice_is_refused(algorithm: str, said: str) -> None:
    problems = looked_at(f"trainer.algorithm={algorithm}").problems
    assert len(problems) == bool(said) and all(said in problem for problem in problems)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.algorithm.ratio=proximal"], "nothing makes up for experience"),
        (["trainer.algorithm.ratio=proximal", "trainer.mini_batches=2"], ""),
        ([*CORRECTED], "loss: clip_high=0.28 is never reached"),
        ([*CORRECTED, "trainer.algorithm.loss.clip_high=0.2"], ""),
        ([*CORRECTED, "trainer.mini_batches=2"], ""),
        ([*CORRECTED, "trainer.algorithm.preset=dapo"], ""),
        ([GSPO, BFLOAT16], "the engine's rounding in bfloat16 alone"),
        ([GSPO], ""),
        (["trainer.algorithm.kl={coefficient: 0.1, place: reward, gradient: k2}"], "a penalty in the reward has no"),
        (["trainer.algorithm={loss: {type: m2po}, ratio: proximal}", "trainer.mini_batches=2"], ""),
        (["trainer.algorithm.preset=gigpo", "replay.filter={type: zero_variance}"], "would teach something here"),
        (["trainer.algorithm.imitate.coefficient=0.1", "replay.filter={type: zero_variance}"], "would teach something"),
        (["replay.filter={type: zero_variance}"], ""),
    ],
)
def test_what_one_should_know_of_is_said(overrides: list[str], said: str) -> None:
    notes = looked_at(*overrides).notes
    assert len(notes) == bool(said) and all(said in note for note in notes)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem)
def test_of_what_is_shipped_nothing_is_to_be_said(path: Path) -> None:
    report = Report()
    algorithm.look(load(path), report)
    assert not report.problems and not report.notes


@pytest.mark.parametrize("advantage", ["gigpo", "self_distillation", "remax", "optimal_token_baseline"])
def test_a_loss_of_ones_own_is_tried_beside_any_advantage(advantage: str) -> None:
    own = "trainer.algorithm.loss={type: custom, function: 'tests.preflight.test_without_effect:loss'}"
    report = looked_at(f"trainer.algorithm.advantage={{type: {advantage}}}", own)
    assert not report.problems and not report.notes


def loss(old_log_prob, log_prob, advantages, mask, importance_weights):  # type: ignore[no-untyped-def]
    return -advantages * log_prob, {}
