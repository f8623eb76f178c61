"""What is written once a run is over."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import penstock
from penstock.pipeline.config import load
from penstock.pipeline.config.origin import Origin
from penstock.pipeline.report.console import print_summary
from penstock.pipeline.run import finish, start
from penstock.pipeline.run.evaluate import print_evaluation
from penstock.pipeline.run.finish import conclude
from penstock.pipeline.run.launcher import InterruptedRunError, RunError
from penstock.pipeline.run.programs import Programs
from penstock.pipeline.run.resume import complete, resumed
from penstock.pipeline.run.summary import WINDOW, finite
from penstock.protocols.messages import LedgerReply
from penstock.protocols.run_lock import read_summary

TOTALS = (
    "lag_max", "tokens_lagging", "trained_tokens", "leased", "finished", "trained", "groups_without_variance",
    "steps_skipped", "prompts_dropped", "generated_tokens", "eval_unusable",
)  # fmt: skip
STATE = {
    "run": "first", "step": 12, "steps": 12, "version": 12, "phase": "done", "evaluations": {"before": math.inf},
    "evaluations_by_set": {}, "evaluated_after": None, "eval_losses": {}, "eval_pairs": {}, "max_lag": 2, "dropped": 0,
    "filtered": {}, "rewards": {},
    "train_s": 1.0, "wall_s": 2.0,
    "totals": dict.fromkeys(TOTALS, 0),
}  # fmt: skip


def test_a_step_without_a_reward_leaves_a_summary_that_is_json(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {type: tiny}\nprompts: {train: {type: sort}}\n")
    rewards = [math.nan, *[0.25] * 9, 0.75, math.nan]
    rows = [{"kind": "step", "step": step, "reward": reward, "grad_norm": 1.0} for step, reward in enumerate(rewards)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ledger = LedgerReply(steps=12, untrained=[])
    summary = conclude(tmp_path, STATE, ledger, 0, "complete")
    assert summary == read_summary(tmp_path) and "NaN" not in (tmp_path / "summary.json").read_text()
    assert summary["reward_first"] is None and summary["eval_before"] is None
    assert (0.25 * (WINDOW - 2) + 0.75) / (WINDOW - 1) == 0.3055555555555556 and summary["reward_last"] == 0.305556
    console = Console(file=io.StringIO())
    print_summary(console, summary, tmp_path)
    assert "reward_last is the mean of the last ten steps" in console.file.getvalue()  # type: ignore[attr-defined]
    assert finite({"reward": [math.nan, 0.1]}) == {"reward": [None, 0.1]}


@pytest.mark.parametrize(("after", "said"), [(12, 0.5), (10, None)])
def test_an_evaluation_of_an_earlier_end_is_not_that_of_this_one(tmp_path: Path, after: int, said: float) -> None:
    (tmp_path / "config.yaml").write_text("model: {type: tiny}\nprompts: {train: {type: sort}}\n")
    state = STATE | {"evaluations": {"after": 0.5}, "evaluated_after": after}
    assert conclude(tmp_path, state, LedgerReply(steps=12, untrained=[]), 0, "interrupted")["eval_after"] == said


def test_a_report_that_is_not_written_costs_no_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text("model: {type: tiny}\nprompts: {train: {type: sort}}\n")
    (tmp_path / "metrics.jsonl").touch()

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(finish, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        conclude(tmp_path, STATE, LedgerReply(steps=12, untrained=[]), 0, "complete")
    assert read_summary(tmp_path)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_run_that_ends_without_a_broker_has_an_outcome_and_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: {type: tiny}\nprompts: {train: {type: sort}}\n")
    config, run = load(file), tmp_path / "run"
    run.mkdir()

    def launch(*_: Any) -> dict[str, Any]:
        for name, row in (("ledger", {"groups": [1]}), ("metrics", {"kind": "step", "reward": math.nan})):
            (run / f"{name}.jsonl").write_text("".join(json.dumps(row | {"step": step}) + "\n" for step in range(3)))
        raise (InterruptedRunError if at_once else RunError)("broker was killed by SIGKILL")

    monkeypatch.setattr(start, "launch", launch)
    programs = Programs(config, {}, run)
    code = start._run(Console(), config, Origin(str(file), ()), run, print_summary, programs, 0.0)
    if at_once:  # Ctrl-C twice
        assert code == 130 and read_summary(run) is None
        return
    summary = read_summary(run)
    assert code == 1 and summary and summary["outcome"] == "failed" and summary["steps"] == 3
    assert summary["error"] == "broker was killed by SIGKILL" and summary["reward_last"] is None
    assert "broker was killed by SIGKILL" in (run / "report.html").read_text()
    with pytest.raises(penstock.RunFailed, match="broker was killed by SIGKILL"):
        penstock.Run(run).wait(5)
    assert complete(run, config) is None and resumed(run, None, [])[0] == config, "it can go on"


def test_an_evaluation_says_where_it_lies_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {"evaluations": {"before": {"held_out": 0.25}}, "look_at_this": ["2 evaluation prompts have no reward"]}
    found |= {"evaluation_parts": {"before": {"held_out/finished_share": 0.75}}}
    (tmp_path / "config.yaml").write_text("model: {type: tiny}\nprompts: {train: {type: sort}, eval_size: 99}\n")
    print_evaluation(Console(width=20), found, tmp_path)
    said = capsys.readouterr().out
    assert "its first 99 rows at most (prompts.eval_size)" in said
    assert f"see {tmp_path / 'metrics.jsonl'}\n" in said and "look at this:" in said
    assert said.startswith("held_out                 0.2500\nheld_out/finished_share  0.7500\n"), "whatever the width"
