"""What one is told at the end of a run that ended well."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.pipeline.config import Config
from penstock.pipeline.report.findings import findings


def config(**rollout: Any) -> Config:
    told = {"sampling": {"max_new_tokens": 12}, **rollout}
    return Config.model_validate({"model": {"type": "tiny"}, "prompts": {"train": {"type": "sort"}}, "rollout": told})


def state(**changes: Any) -> dict[str, Any]:
    totals = {"trained": 80, "groups_without_variance": 10, "eval_unusable": 0} | changes.pop("totals", {})
    return {"totals": totals, "phase": "done", "step": 10, "steps": 10, "rewards": {}} | changes


def steps(**changes: Any) -> list[dict[str, Any]]:
    row = {"skipped": 0.0, "loss": 0.1, "grad_norm": 0.5, "finished_share": 1.0, "mismatch_bound": 0.05}
    return [row | {"step": step} | changes for step in range(10)]


def test_of_a_run_in_which_all_went_well_nothing_is_said() -> None:
    said = {"source": "reward exact_match", "calls": 640, "failed": 0, "words": "", "last": ""}
    assert (
        findings(
            config(), state(rewards={"reward/exact_match": said}), steps(mismatch_kl_k3=0.01, loss_scale=65536.0), []
        )
        == []
    )
    assert findings(config(), state(), steps(skipped=0.25), []) == [], "the other updates have changed the weights"
    (line,) = findings(
        config(), state(trackers={"wandb": "ConnectionError: no network; 6 rows wait for it"}), steps(), []
    )
    assert line.startswith("run.trackers: wandb failed when the run ended (ConnectionError: no network")


FAILED = {
    "source": "reward mine:judge",
    "calls": 100,
    "failed": 60,
    "words": "60 of 100 calls failed: 60 timed out",
    "last": "judge timed out after 10 s",
}
DROP = {"group": 3, "kind": "prompt", "reason": "row 7: the prompt is empty"}


@pytest.mark.parametrize(
    ("seen", "rows", "drops", "words"),
    [
        (state(), steps(skipped=1.0, loss=float("nan")), [], "every step was skipped"),
        (state(), [*steps()[:9], *steps(skipped=1.0)[9:]], [], "1 of 10 steps were skipped"),
        (state(), steps(grad_norm=0.0), [], "nothing was learned"),
        (state(), steps(loss_scale=2.0), [], "the loss scale fell to 2, and small gradients are lost"),
        (state(totals={"groups_without_variance": 41}), steps(), [], "41 of 80 trained groups had answers of equal"),
        (
            state(totals={"groups_without_variance": 76}),
            steps(groups_without_variance=7.6, solved_all=0.5, solved_none=0.45),
            [],
            "too hard, or the reward does not tell answers apart; replay.filter=zero_variance",
        ),
        (
            state(totals={"groups_without_variance": 41}),
            steps(given_tokens=9.0),
            [],
            "nothing is learned of the policy's own",
        ),
        (state(step=6), steps()[:6], [], "the run ended after 6 of 10 steps: the prompts ended"),
        (state(rewards={"reward/judge": FAILED}), steps(), [], "60 timed out; the last one timed out after 10 s"),
        (state(), steps(), [DROP], "1 prompts were dropped, since they cannot be used; the last one: row 7"),
        (state(totals={"not_in_store": 7}), steps(), [], "store.url: the store knew nothing of the 7 steps"),
        (
            state(totals={"rolled_back": 7}),
            steps(),
            [],
            "it was taken back to version 7 (penstock rollback): totals are",
        ),
        (state(totals={"eval_unusable": 2}), steps(), [], "2 times an evaluation prompt had no reward"),
        (
            state(totals={"groups_without_variance": 61}),
            steps(groups_without_variance=6.1, solved_all=0.01, solved_none=0.7),
            [],
            "learned (1 of them since all were right): the prompts are too easy or too hard",
        ),
        (
            state(totals={"groups_without_variance": 76}),
            steps(groups_without_variance=7.6, solved_all=0.9, solved_none=0.05),
            [],
            "72 of them had the highest reward of their step. The task is learned, and fewer steps would do",
        ),
        (
            state(),
            steps(mismatch_kl_k3=0.2, mismatch_fresh_kl_k3=0.3),
            [],
            "engines and trainer disagreed in 10 of 10 steps",
        ),
        (
            state(),
            steps(mismatch_kl_k3=0.2, mismatch_fresh=0.06, mismatch_fresh_kl_k3=2e-3),
            [],
            "the policy had moved far from the versions",
        ),
        (state(), steps(mismatch_kl_k3=0.2), [], "no token there was of its own version"),
    ],
)
def test_each_is_a_sentence(
    seen: dict[str, Any], rows: list[dict[str, Any]], drops: list[dict[str, Any]], words: str
) -> None:
    (sentence,) = findings(config(), seen, rows, drops)
    assert words in sentence


GUESS = {"environment": "mine:Guess", "max_turns": 4}


@pytest.mark.parametrize(
    ("rollout", "where"),
    [
        ({}, "cut off at rollout.sampling.max_new_tokens=12"),
        ({"sampling": {"max_new_tokens": None}}, "cut off where rollout.engine.max_length has no room for more"),
        (
            {"environment": GUESS},
            "cut off at rollout.environment.max_turns=4 (they had 3.5 turns in the mean), or at "
            "rollout.sampling.max_new_tokens=12 in the last turn, or where rollout.engine.max_length has no room for "
            "more",
        ),
    ],
)
def test_of_what_cuts_answers_off_only_that_is_named_which_can(rollout: dict[str, Any], where: str) -> None:
    rows = steps(finished_share=0.2, turns=3.5)
    (sentence,) = findings(config(**rollout), state(), rows, [])
    assert sentence == f"80 % of the last steps' answers were {where}"


def test_the_best_policy_is_kept_or_its_loss_is_told() -> None:
    fell = state(evaluations={"before": 0.5, "after": 0.7}, evaluated_after=10, best={"score": 0.9, "step": 4})
    (line,) = findings(config(), fell, steps(), [])
    assert "fell from 0.9 after step 4 to 0.7" in line and "trainer.checkpoint.keep_best=true" in line
    asked = {"train": {"type": "sort"}, "eval": {"type": "sort"}, "eval_every": 2}
    told = {"model": {"type": "tiny"}, "prompts": asked, "trainer": {"checkpoint": {"every": 2, "keep_best": True}}}
    kept = Config.model_validate(told)
    assert not findings(kept, fell, steps(), [])
    assert not findings(config(), fell | {"evaluations": {"before": 0.5, "after": 0.85}}, steps(), [])
    assert not findings(config(), fell | {"evaluated_after": 5}, steps(), [])


def test_of_a_task_that_was_learned_by_and_by_nothing_is_said() -> None:
    rows = [
        row | {"groups_without_variance": 6.0, "solved_all": place / 10, "solved_none": 0.1}
        for place, row in enumerate(steps())
    ]
    assert findings(config(), state(totals={"groups_without_variance": 60}), rows, []) == []
