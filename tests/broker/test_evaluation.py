"""Evaluations with several answers to a prompt: what they tell, and that rollouts are asked for them."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.pipeline.config import ConfigError, load
from penstock.protocols import messages as m
from penstock.protocols.columns import Column, ColumnTable, WeightedSum
from penstock.protocols.experience import Prompt, Sampling, Trajectory
from penstock.services.broker import best_version
from penstock.services.broker.config import CurriculumConfig, EvalSampling, PromptsConfig, ReplayConfig
from penstock.services.broker.evaluated import _parts, _vote
from penstock.services.broker.rules.course import best_of
from penstock.services.broker.rules.evaluation import Evaluation, majority, pass_at
from penstock.services.broker.rules.held_out_losses import HeldOutLosses
from penstock.services.broker.rules.journal import Volatile
from penstock.services.broker.service import Broker
from penstock.services.data.held_out import HeldOut
from penstock.services.runtime.lines import read_lines
from tests.broker.machine import Memory
from tests.broker.test_broker import Stage
from tests.broker.test_broker import settings as settings_of


@given(st.lists(st.booleans(), min_size=1, max_size=10))
def test_pass_at_k_is_the_share_of_draws_with_one_that_passes(passed: list[bool]) -> None:
    found = pass_at(len(passed), sum(passed))
    assert next(iter(found)) == "pass@1" and list(found)[-1] == f"pass@{len(passed)}"
    for name, value in found.items():
        draws = list(combinations(passed, int(name.removeprefix("pass@"))))
        assert value == pytest.approx(sum(map(any, draws)) / len(draws))


@given(st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.floats(0, 1)), min_size=1, max_size=9))
def test_the_majority_is_what_most_say(said: list[tuple[str | None, float]]) -> None:
    answers, rewards = [a for a, _ in said], [r for _, r in said]
    found = majority(answers, rewards)
    a, b = answers.count("a"), answers.count("b")
    if not a and not b:
        assert found == 0.0
    elif a != b:
        assert found == rewards[answers.index("a" if a > b else "b")]
    else:
        assert found == rewards[min(answers.index("a"), answers.index("b"))]


def test_each_set_has_its_own_figures() -> None:
    evaluation = Evaluation(Volatile(), 3, [], lambda draw: "hard" if draw else "easy")
    evaluation.start("before", 0, None)
    told: list[tuple[float, dict[str, float]]] = [(1.0, {}), (0.5, {"pass@2": 1.0}), (0.0, {"pass@2": 0.0})]
    for number, (reward, scores) in enumerate(told):
        real = sorted(evaluation.leases.open)[0]
        assert evaluation.finish(real, 0, 0, 1, 2), number
        done = evaluation.score(real, reward, scores, {"response_tokens": 4.0 + number})
    assert done is not None and done.mean() == 0.5
    assert evaluation.by_set["before"] == {"easy": 1.0, "hard": 0.25, "hard/pass@2": 0.5}
    assert evaluation.parts["before"] == {"easy/response_tokens": 4.0, "hard/response_tokens": 5.5}
    found = {by: evaluation.course(by) for by in ("hard", "hard/pass@2", "hard/response_tokens", "easy/pass@2")}
    assert found == {
        "hard": [(0, 0.25)], "hard/pass@2": [(0, 0.5)], "hard/response_tokens": [(0, 5.5)], "easy/pass@2": []
    }  # fmt: skip


def test_the_newest_evaluation_is_the_last() -> None:
    """Of a run that was complete, and went on with more steps, there are two after training."""
    evaluation = Evaluation(Volatile(), 1, [], lambda draw: "easy")
    for label, step in (("before", 0), ("after", 20), ("step 30", 30), ("after", 40)):
        evaluation.start(label, step, None)
        (number,) = evaluation.leases.open
        assert evaluation.finish(number, step, step, 1, 2) and evaluation.score(number, step / 100)
    assert list(evaluation.by_set.items())[-1] == ("after", {"easy": 0.4})
    assert evaluation.course() == [(0, 0.0), (20, 0.2), (30, 0.3), (40, 0.4)], "and none before is forgotten"


EVALUATED = PromptsConfig.model_validate({"train": {"type": "sort", "size": 50}, "eval": {"type": "sort", "size": 4}})


def test_a_round_of_which_few_prompts_had_a_reward_is_no_best(tmp_path: Path) -> None:
    journal = Volatile()
    evaluation = Evaluation(journal, 4, [])
    for label, step, rewards in (("step 10", 10, [0.5] * 4), ("step 20", 20, [1.0, None, None, None])):
        evaluation.start(label, step, None)
        for number, reward in zip(list(evaluation.leases.open), rewards, strict=True):
            assert evaluation.finish(number, step, step, 1, 2)
            _ = evaluation.drop(number, "away") if reward is None else evaluation.score(number, reward)
    assert evaluation.results["step 20"] == 1.0, "it is told"
    assert evaluation.course() == [(10, 0.5)]


def opened(folder: Path, url: str, **more: Any) -> Broker:
    """One that has taken up its store, and serves nobody yet."""
    return Broker(settings_of(folder, prompts=EVALUATED, **more), url)


def test_a_new_store_is_told_of_the_evaluations_before(tmp_path: Path, redis_url: str) -> None:
    """Or the next one would be the best, and the checkpoint of the best one deleted."""
    rows = [
        {"kind": "eval", "label": f"step {step}", "step": step, "reward": reward, "sets": {"held_out": reward}}
        for step, reward in ((4, 0.5), (8, 0.9), (12, 0.7), (16, 1.0))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for version in (8, 12):
        (tmp_path / "checkpoints" / f"step-{version:06d}").mkdir(parents=True)
    state = opened(tmp_path, redis_url)._state
    assert best_version.worth_keeping(state) == [8], "step 16 has no checkpoint, and is done again"
    for label, step, reward, unusable in (("after", 9, 0.95, 0), ("after", 11, 0.1, 0), ("step 12", 12, 1.0, 30)):
        row = {"label": label, "step": step, "reward": reward, "sets": {}, "prompts": 4, "unusable": unusable}
        state.evaluation.recall(row)
    assert best_version.worth_keeping(state) == [9], "of two ends the one before too, and none that says too little"
    state.router.close()


def test_evaluations_by_other_rewards_are_no_rivals(tmp_path: Path, redis_url: str) -> None:
    rewards = [{"reward": {"functions": [{"function": name}]}} for name in ("number", "exact_match")]
    broker = opened(tmp_path, redis_url, described=rewards[0])
    state = broker._state
    state.evaluation.recall({"label": "step 2", "step": 2, "reward": 0.9, "sets": {}})
    broker._remember()
    state.store.commit()
    state.router.close()
    watched = {"reward": {**rewards[0]["reward"], "workers": 8}}
    watched["reward"]["functions"] = [*rewards[0]["reward"]["functions"], {"function": "length", "weight": 0}]
    for described, best in ((rewards[0], 0.9), (watched, 0.9), (rewards[1], None)):
        state = opened(tmp_path, redis_url, described=described)._state
        found = best_version.best(state)
        assert (found.score if found else None) == best
        assert best_version.worth_keeping(state) == [2], "until there is one by the new rewards"
        state.router.close()


def test_of_two_evaluations_of_the_same_version_one_counts() -> None:
    evaluation = Evaluation(Volatile(), 1, [])
    for label, step in (("step 10", 10), ("step 20", 20), ("after", 20)):
        evaluation.start(label, step, None)
        (number,) = evaluation.leases.open
        assert evaluation.finish(number, step, step, 1, 2) and evaluation.score(number, 0.5)
    assert evaluation.course() == [(10, 0.5), (20, 0.5)]


def test_what_an_older_version_says_is_no_answer() -> None:
    evaluation = Evaluation(Volatile(), 1, [])
    evaluation.start("step 10", 10, exact=None)
    (number,) = evaluation.leases.open
    assert not evaluation.finish(number, 9, 10, 1, 4) and evaluation.leases.open
    assert evaluation.finish(number, 10, 12, 1, 4) and not evaluation.leases.open


def test_sampling_is_the_sets_own() -> None:
    greedy = Sampling(n=1, temperature=0.0, max_new_tokens=12, stop=("x",))
    several = EvalSampling(n=8, temperature=0.6, top_p=0.9).of(greedy)
    assert (several.n, several.temperature, several.top_p, several.stop) == (8, 0.6, 0.9, ("x",))
    assert several.max_new_tokens == 12 and EvalSampling().of(greedy) == greedy
    assert EvalSampling(max_new_tokens=99).of(greedy).max_new_tokens == 99
    assert EvalSampling(max_new_tokens="fits").of(greedy).max_new_tokens == 0, "as training's is, where it is null"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"n": 4}, "all the same"),
        ({"answer": "("}, "no regular expression"),
        ({"answer": "a"}, "has 0 groups"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        EvalSampling.model_validate(given)


def test_a_set_that_is_not_there_is_named() -> None:
    with pytest.raises(ValidationError, match="no evaluation set 'aime'; the sets of eval are: held_out"):
        PromptsConfig.model_validate(
            {"train": {"type": "sort"}, "eval": {"type": "sort"}, "eval_sampling": {"aime": {}}}
        )


def test_nan_has_not_passed() -> None:
    rewards = np.array([np.nan, 1.0], np.float32)
    assert int((rewards >= EvalSampling().passes).sum()) == 1


def test_a_prompt_to_which_nothing_was_said_is_answered() -> None:
    evaluation = Evaluation(Volatile(), 1, [])
    evaluation.start("before", 0, exact=0)
    (number,) = evaluation.leases.open
    assert evaluation.finish(number, -1, -1, 1, 4) and not evaluation.leases.open


def test_votes_are_of_boxes_or_of_a_pattern_that_does_not_hold_up_the_broker() -> None:
    some = np.zeros(2, np.int32)
    one = Trajectory(some, np.array([0, 1], np.uint8), some.astype(np.float32), np.array([-1, 0], np.int32), "")
    endless = r"boxed\{((?:[^{}]+|\{[^{}]*\})*)\}"
    began = time.monotonic()
    assert _vote(replace(one, text="boxed{" + "1" * 60), endless) is None and time.monotonic() - began < 5
    assert _vote(replace(one, text="so boxed{1{2}3}"), endless) == "1{2}3"
    boxed = EvalSampling(answer="boxed").answer
    for said, vote in ((r"\boxed{0}, no: \boxed{\frac{1}{2}}.", r"\frac{1}{2}"), (r"\boxed{\frac{1}{3}", None)):
        assert _vote(replace(one, text=said), boxed) == vote


def test_what_the_reward_is_made_of_is_told_where_that_is_one_column_too() -> None:
    each = {"reward": np.array([0.5, 1.0]), "reward/environment": np.array([0.5, 1.0])}
    assert _parts(each, None, np.arange(2)) == {"reward/environment": 0.75}


def test_another_part_of_the_truth_is_another_measure_and_a_key_that_is_not_set_is_none() -> None:
    def measured(**function: object) -> str:
        said: Any = SimpleNamespace(settings=SimpleNamespace(described={"reward": {"functions": [function]}}))
        return best_version.measure(said)

    plain = measured(function="regex")
    assert plain == measured(function="regex", truth_key=None, own_words=None)
    assert len({plain, measured(function="regex", truth_key="a"), measured(function="regex", own_words=False)}) == 3


def test_the_lower_loss_is_the_better_one() -> None:
    journal = Memory()
    losses = HeldOutLosses(journal)
    for step, sets in ((0, {"a": 4.0, "b": 2.0}), (20, {"a": 1.0, "b": 3.0}), (10, {"a": 2.0, "b": 1.0})):
        losses.note(step, sets, {"a": {"preferred_margin": 0.1 * step}} if step else {})
    journal.commit()
    again = HeldOutLosses(journal)
    assert (again.by_step, again.pairs) == (losses.by_step, losses.pairs) and again.pairs[0] == {}
    again.note(5, {"a": float("nan"), "b": 0.0}, {})
    assert again.course() == [(0, -3.0), (10, -1.5), (20, -2.0)] and again.course("a")[-1] == (20, -1.0)
    best = best_of(again.course())
    assert best and (best.step, best.since) == (10, 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"eval": {"x": {"type": "sort"}}, "eval_given": {"x": {"type": "sort"}}}, "eval has a set of the name 'x'"),
        ({"eval_given": {"type": "sort"}, "best_by": "aime"}, "sets of eval and eval_given are: given"),
    ],
)
def test_sets_of_both_kinds_have_names_of_their_own(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        PromptsConfig.model_validate({"train": {"type": "sort"}} | given)


def test_a_run_ends_early_by_the_loss_that_the_trainer_measures(tmp_path: Path, redis_url: str) -> None:
    prompts = PromptsConfig.model_validate(
        {"train": {"type": "sort", "size": 50}, "eval_given": {"type": "sort", "size": 80, "seed": 1}}
        | {"eval_every": 1, "eval_size": 70, "stop_after": 2}
    )
    stage = Stage(tmp_path, redis_url, prompts=prompts, steps=9)
    trainer = stage.peer("trainer", "trainer")
    first = trainer.box.ask(m.HeldOutRequest(begin=0), 5)
    assert isinstance(first, m.HeldOutRows) and first.more and {row.set for row in first.rows} == {"given"}
    rest = trainer.box.ask(m.HeldOutRequest(begin=first.next), 5)
    assert isinstance(rest, m.HeldOutRows) and not rest.more and len(first.rows) + len(rest.rows) == 70
    assert all(row.prompt.truth for row in first.rows)
    stage.rollout()
    for step, loss in enumerate((4.0, 1.0, 1.5, 1.5, 1.25)):
        for _ in range(2):  # said again, it is one
            assert trainer.box.ask(m.EvalLoss(step=step, sets={"given": loss}), 5) == m.Ack()
    state = stage.broker.state
    assert state["best"] == {"step": 1, "score": 1.0, "since": 3}
    assert "2 evaluations in a row were no better than 1, after step 1" in state["early"] and state["steps"] == 9
    stage.close()
    rows = [row for row in read_lines(tmp_path / "metrics.jsonl") if row["kind"] == "eval_loss"]
    assert [row["sets"]["given"] for row in rows] == [4.0, 1.0, 1.5, 1.5, 1.25]


def test_the_last_loss_ends_no_run_early(tmp_path: Path, redis_url: str) -> None:
    """It may go on with more steps."""
    prompts = PromptsConfig.model_validate(
        {"train": {"type": "sort", "size": 50}, "eval_given": {"type": "sort", "size": 4, "seed": 1}}
        | {"eval_every": 1, "stop_after": 1}
    )
    stage = Stage(tmp_path, redis_url, prompts=prompts, steps=2)
    trainer = stage.peer("trainer", "trainer")
    for step, loss in ((1, 1.0), (2, 2.0)):
        trainer.box.ask(m.EvalLoss(step=step, sets={"given": loss}), 5)
    assert not stage.broker.state["early"]
    trainer.box.ask(m.EvalLoss(step=1, sets={"given": 3.0}), 5)
    trainer.box.ask(m.EvalLoss(step=0, sets={"given": 0.5}), 5)
    assert "after step 0" in stage.broker.state["early"]
    stage.close()


@pytest.mark.parametrize(("steps", "purpose"), [(4, "train"), (0, "eval")])
def test_a_run_may_train_without_a_first_evaluation_unless_it_is_all_there_is(
    tmp_path: Path, redis_url: str, steps: int, purpose: str
) -> None:
    prompts = PromptsConfig.model_validate(
        {"train": {"type": "sort", "size": 50}, "eval": {"type": "sort", "size": 2, "seed": 1}, "eval_before": False}
    )
    stage = Stage(tmp_path, redis_url, prompts=prompts, steps=steps)
    assert {lease.purpose for lease in stage.rollout().leases(2)} == {purpose}
    assert stage.broker.state["evaluations"] == {}
    stage.close()


EXACT = Column(name="reward/exact", scorer="reward", nullable=True, evaluated=True)
SHORT = Column(name="reward/short", scorer="reward", nullable=True, evaluated=True)
BOTH = ColumnTable(columns=(EXACT, SHORT), sums=(WeightedSum(name="reward", terms={EXACT.name: 1.0, SHORT.name: 0.5}),))


def test_right_answers_pass_though_something_else_takes_off_from_their_reward(tmp_path: Path, redis_url: str) -> None:
    several = {"n": 2, "temperature": 1.0, "column": EXACT.name}
    prompts = PromptsConfig.model_validate(
        {"train": {"type": "sort", "size": 50}}
        | {"eval": {"type": "mix", "sources": {name: {"type": "sort", "size": 1} for name in ("easy", "hard")}}}
        | {"eval_sampling": {"held_out": several}, "eval_samples": 1, "best_by": "held_out/reward/exact"}
    )
    stage = Stage(tmp_path, redis_url, prompts=prompts, columns=BOTH)
    rollout, reward = stage.rollout(), stage.peer("reward", "reward-0")
    reward.box.tell(m.Credit(total=100))
    marks = {EXACT: [[1, 0], [0, 1]], SHORT: [[-1, -1], [-1, math.nan]]}
    leases = [lease for lease in rollout.leases(2) if lease.purpose == "eval"]
    for lease in leases:
        rollout.finish(lease, metrics={"solved": 0.25})
    for column, values in marks.items():
        said = [
            m.Score(purpose="eval", number=lease.number, values=np.array(each, np.float32))
            for lease, each in zip(leases, values, strict=True)
        ]
        reward.box.ask(m.Scores(column=column.name, scores=said), 5)
    best = stage.broker.state["best"]
    assert best and best["score"] == 0.5, "by the part that is named"
    stage.close()
    (row,) = [row for row in read_lines(tmp_path / "metrics.jsonl") if row["kind"] == "eval"]
    assert row["reward"] == pytest.approx((0.0 - 0.5) / 2), "of answers that have one, the mean of each prompt"
    assert {name: row["sets"][f"held_out/{name}"] for name in ("pass@1", "pass@2")} == {"pass@1": 0.5, "pass@2": 1.0}
    assert row["parts"] == {
        "held_out/reward/exact": 0.5, "held_out/reward/short": -1.0, "held_out/response_tokens": 2.0,
        "held_out/finished_share": 1.0, "held_out/agent/solved": 0.25,
        **{f"held_out/source/{name}/pass@{k}": k / 2 for name in ("easy", "hard") for k in (1, 2)},
        "held_out/source/easy/maj@2": 1.0, "held_out/source/hard/maj@2": 0.0,
        "held_out/source/easy": 0.0, "held_out/source/hard": -0.5,
    }  # fmt: skip
    kept = read_lines(tmp_path / "eval_samples.jsonl")
    assert [(each["label"], each["set"], each["row"], each["sample"], each["reward/exact"]) for each in kept] == [
        ("before", "held_out", 0, 0, 1.0), ("before", "held_out", 0, 1, 0.0)
    ]  # fmt: skip
    assert all(each["response"] == "ab" and each["step"] == 0 and "group" not in each for each in kept)


@pytest.mark.parametrize("rule", [{"type": "none"}, {"type": "range", "column": EXACT.name}])
@pytest.mark.parametrize("last", [EXACT, SHORT])
def test_a_curriculum_goes_by_its_own_column(
    tmp_path: Path, redis_url: str, last: Column, rule: dict[str, Any]
) -> None:
    """Also of groups that are left out because of the same."""
    rests = CurriculumConfig(column=EXACT.name, rest_hard=3, rest_easy=3)
    prompts = PromptsConfig.model_validate({"train": {"type": "sort", "size": 50}, "eval": None, "curriculum": rests})
    replay = ReplayConfig.model_validate({"filter": rule})
    stage = Stage(tmp_path, redis_url, prompts=prompts, columns=BOTH, replay=replay)
    rollout, reward = stage.rollout(), stage.peer("reward", "reward-0")
    reward.box.tell(m.Credit(total=100))
    leases = rollout.leases(3)
    for lease in leases:
        rollout.finish(lease)
    marks = {EXACT: [[1, 1], [1, 0], [0, 0]], SHORT: [[-1, 0]] * 3}
    for column in sorted(marks, key=lambda column: column is last):
        said = [
            m.Score(purpose="train", number=lease.number, values=np.array(each, np.float32))
            for lease, each in zip(leases, marks[column], strict=True)
        ]
        reward.box.ask(m.Scores(column=column.name, scores=said), 5)
    state = stage.broker._state
    assert sorted(map(int, state.store.rows("curriculum"))) == sorted(state.prompts.row(draw) for draw in (0, 2))
    stage.close()


MINE = "rollout.engine={type: plugin, name: 'm:M'}"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["prompts.best_by=held_out/reward/exact_match"], ""),
        (["prompts.best_by=held_out/source/gsm8k"], ""),
        (["prompts.eval={a/b: {type: sort}}", "prompts.best_by=a/b"], ""),
        (["prompts.eval={a/b: {type: sort}}", "prompts.best_by=a/b/response_tokens"], ""),
        (["prompts.eval={a/b: {type: sort}}", "prompts.best_by=a"], "there is no evaluation set 'a'"),
        (["prompts.best_by=held_out/pass@2"], "no evaluation tells 'held_out/pass@2'; of held_out there are reward/ex"),
        (["prompts.best_by=held_out/pass@2", "prompts.eval_sampling={held_out: {n: 4, temperature: 1.0}}"], ""),
        (["prompts.eval_sampling={held_out: {column: reference}}"], "reference is not asked for in evaluations"),
        (["prompts.eval_sampling={held_out: {column: reward/exact}}"], "did you mean 'reward/exact_match'?"),
        (["prompts.eval_sampling={held_out: {max_new_tokens: fits}}"], ""),
        (
            ["prompts.eval_sampling={held_out: {max_new_tokens: fits}}", MINE],
            "max_new_tokens=fits: only the engine (m:M)",
        ),
        (
            ["prompts.eval_sampling={held_out: {max_new_tokens: true}}"],
            "max_new_tokens: Input should be 'fits', got True",
        ),
        (["prompts.curriculum={column: reward/exact}"], "prompts.curriculum.column: no scorer writes"),
    ],
)
def test_what_an_evaluation_is_told_by_is_there(overrides: list[str], said: str) -> None:
    quickstart = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    if not said:
        load(quickstart, overrides)
        return
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(quickstart, overrides)


def test_a_held_out_row_that_cannot_be_told_costs_itself(tmp_path: Path, redis_url: str) -> None:
    stage = Stage(tmp_path, redis_url)
    rows = [Prompt(index=n, text="a", truth={"more": {"number": 2 ** (70 if n == 1 else 7)}}) for n in range(3)]
    rows.append(Prompt(index=3, text="a" * (5 << 20)))
    stage.broker._state.held_out_given = HeldOut({"given": [*rows, rows[0]]}, 9)
    said, begin = [], 0
    trainer = stage.peer("trainer", "trainer")
    while not said or said[-1].more:
        said.append(trainer.box.ask(m.HeldOutRequest(begin=begin), 5))
        begin = said[-1].next
    assert [[row.prompt.index for row in each.rows] for each in said] == [[0, 2, 3], [0]]
    stage.close()


def test_whoever_looks_again_and_again_is_told_the_first_and_the_newest(tmp_path: Path, redis_url: str) -> None:
    stage = Stage(tmp_path, redis_url)
    for step in range(0, 3000, 10):
        label, told = f"step {step}" if step else "before", {"held_out": step / 3000}
        row = {"label": label, "step": step, "reward": step / 3000, "sets": told, "parts": {"held_out/length": 1.0}}
        stage.broker._state.evaluation.recall(row)
    observer = stage.peer("observer", "o")
    few, whole = (observer.box.ask(m.StatusRequest(whole=whole), 5).state for whole in (False, True))
    for name in ("evaluations", "evaluations_by_set", "evaluation_parts"):
        assert list(few[name]) == ["before", "step 2990"] and len(whole[name]) == 300
        assert {label: whole[name][label] for label in few[name]} == few[name]
    stage.close()
