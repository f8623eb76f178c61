"""summary.json: what a run came to, with its promises checked against the rollouts' own logs."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.pipeline.config import Config, ConfigError, load
from penstock.pipeline.report.findings import findings
from penstock.protocols.messages import LedgerReply
from penstock.services.runtime.lines import each_line, read_lines

WINDOW = 10
"""reward_last is the mean over this many steps, of those that have one."""
DIGITS = 6
"""Of a reward in the summary."""


def check_run(folder: Path, key: str = "RUN") -> None:
    """Raises `ConfigError`, which names ``key``, where ``folder`` is no run's."""
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{key}: {folder} is not a run's folder: it has no config.yaml")


def finite(data: Any) -> Any:
    """``data`` as JSON can say it: null where a number is infinite, or none."""
    return json.loads(json.dumps(data), parse_constant=lambda _: None)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The run's steps from metrics.jsonl, one row a step, in order."""
    return steps_in(each_line(folder / "metrics.jsonl"))


def steps_in(metrics: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those among the rows of a metrics.jsonl; of a step that stands there twice the last one."""
    rows = {row["step"]: row for row in metrics if row["kind"] == "step"}
    return [rows[step] for step in sorted(rows)]


def audit(folder: Path, ledger: LedgerReply) -> dict[str, int]:
    """Compares what the rollouts say they finished (their logs) with what the ledger says was trained.

    A finished group that is neither trained, nor dropped with a reason, nor waiting in the replay, is lost. A group in
    two steps, or twice in one, was trained twice.
    """
    finished = {row["group"] for path in (folder / "logs").glob("*.finished.jsonl") for row in each_line(path)}
    steps = {row["step"]: row["groups"] for row in each_line(folder / "ledger.jsonl")}
    trained = Counter(group for step, groups in steps.items() if step < ledger.steps for group in groups)
    dropped = {row["group"] for row in each_line(folder / "dropped.jsonl")}
    return {
        "groups_lost": len(finished - trained.keys() - dropped - set(ledger.untrained)),
        "groups_trained_twice": sum(count - 1 for count in trained.values()),
        "groups_finished_logged": len(finished),
    }


def mean_of_last(rewards: Sequence[float]) -> float | None:
    """Of the last `WINDOW` steps that have one; None where none has."""
    last = [reward for reward in rewards[-WINDOW:] if math.isfinite(reward)]
    return rounded(sum(last) / len(last)) if last else None


def rounded(value: float | None) -> float | None:
    """A reward to `DIGITS`, which is what a mean of float32 is worth."""
    return None if value is None else float(f"{value:.{DIGITS}g}")


def _config(folder: Path) -> Config | None:
    """The run's; None where somebody has made it one that cannot be read, for the next start."""
    try:
        return load(folder / "config.yaml")
    except ConfigError:
        return None


def summarize(folder: Path, state: dict[str, Any], ledger: LedgerReply, restarts: int, outcome: str) -> dict[str, Any]:
    """The summary of a run, from the broker's last state, the ledger and the run's files."""
    steps = steps_of(folder)
    rewards = [row["reward"] for row in steps]
    totals = state["totals"]
    drops, losses, pairs = read_lines(folder / "dropped.jsonl"), state["eval_losses"], state["eval_pairs"]
    found = {
        "run": state["run"],
        "outcome": outcome,
        "steps": state["step"],
        "version": state["version"],
        "reward_first": rounded(rewards[0]) if rewards else None,
        "reward_last": mean_of_last(rewards),
        "eval_before": rounded(state["evaluations"].get("before")),
        "eval_after": rounded(state["evaluations"].get("after")) if state["evaluated_after"] == state["step"] else None,
        "eval_loss_before": losses.get("0"),
        "eval_loss_after": losses.get(str(state["step"])),
        "eval_pairs_after": pairs.get(str(state["step"])) or None,
        "eval_best": rounded(best["score"]) if (best := state.get("best")) else None,
        "eval_best_step": best["step"] if best else None,
        "max_lag": max([state["max_lag"], *(row.get("max_lag", 0) for row in steps)]),
        "lag_max_seen": totals["lag_max"],
        "lagging_share": totals["tokens_lagging"] / max(1, totals["trained_tokens"]),
        "groups_leased": totals["leased"],
        "groups_finished": totals["finished"],
        "groups_trained": totals["trained"],
        "groups_dropped": state["dropped"],
        "groups_filtered": state["filtered"],
        **audit(folder, ledger),
        "groups_without_variance": totals["groups_without_variance"],
        "steps_skipped": totals["steps_skipped"],
        "rewards_failed": sum(said["failed"] for said in state["rewards"].values()),
        "reward_failures": {name: said["kinds"] for name, said in state["rewards"].items() if said["failed"]},
        "prompts_dropped": totals["prompts_dropped"],
        "generated_tokens": totals["generated_tokens"],
        "trained_tokens": totals["trained_tokens"],
        "train_s": round(state["train_s"], 3),
        "wall_s": round(state["wall_s"], 3),
        "restarts": restarts,
        "evaluations": state["evaluations_by_set"],
        "evaluation_parts": state.get("evaluation_parts", {}),
        "eval_losses": losses,
        "eval_pairs": {step: found for step, found in pairs.items() if found},
        "look_at_this": findings(_config(folder), state, steps, drops),
    }
    return dict(finite(found))
