"""Every built-in method lifts the quickstart's reward. A minute each: `make learning`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, Run, check_promises

pytestmark = [pytest.mark.learning, pytest.mark.timeout(600)]
PLAIN = ["loss={type: reinforce}", "correction={type: truncated}"]
METHODS = {
    "dapo": ["loss={type: ppo_clip, clip_high: 0.28}"],
    "dr_grpo": ["advantage={type: grpo, std: false}", "aggregation=seq-mean-token-sum-norm", "length_scale=12"],
    "remax": ["advantage={type: remax}"],
    "rloo": ["advantage={type: rloo}"],
    "reinforce_plus_plus": ["advantage={type: reinforce_plus_plus}"],
    "reinforce_plus_plus_baseline": ["advantage={type: reinforce_plus_plus_baseline}"],
    "opo": ["advantage={type: opo}", *PLAIN],
    "gpg": ["advantage={type: gpg}", *PLAIN],
    "maxrl": ["advantage={type: maxrl}"],
    "gspo": ["loss={type: gspo}"],
    "cispo": ["loss={type: cispo}"],
    "sapo": ["loss={type: sapo}"],
    "gmpo": ["loss={type: geo_mean}"],
    "dppo": ["loss={type: dppo_tv}"],
    "dro": ["loss={type: dro}"],
    "icepop": ["loss={type: reinforce}", "correction={type: icepop}"],
}


def test_ppo_with_a_critic_lifts_the_reward(tmp_path: Path) -> None:
    summary = Run(tmp_path, [], ROOT / "configs" / "ppo.yaml").wait(500)
    check_promises(summary)
    assert summary["reward_last"] >= 0.85 and summary["eval_after"] >= 0.95


def test_a_task_of_two_turns_with_a_tool_is_learned(tmp_path: Path) -> None:
    summary = Run(tmp_path, [], ROOT / "examples" / "own-environment" / "config.yaml").wait(500)
    check_promises(summary)
    assert summary["reward_first"] <= 0.1 and summary["reward_last"] >= 0.85


@pytest.mark.parametrize("method", METHODS)
def test_the_reward_rises(method: str, tmp_path: Path) -> None:
    run = Run(tmp_path, [f"trainer.algorithm.{choice}" for choice in METHODS[method]])
    summary = run.wait(500)
    check_promises(summary)
    assert summary["reward_last"] >= 0.85
