"""What a run came to, on a terminal."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console

log = structlog.get_logger()

SHOWN = (
    "outcome", "steps", "reward_first", "reward_last", "eval_before", "eval_after", "eval_loss_before",
    "eval_loss_after", "eval_pairs_after", "eval_best", "eval_best_step",
    "lag_max_seen", "groups_trained",
    "groups_lost", "groups_trained_twice", "groups_without_variance", "steps_skipped", "rewards_failed",
    "prompts_dropped", "train_s", "restarts",
)  # fmt: skip


UNSAID = ("eval_loss", "eval_pairs", "eval_best_step")
"""Left out where there is none."""


class OwnConsole(Console):
    """On which names of the user's stay as they are, :key: no less."""

    def __init__(self, **how: Any) -> None:
        super().__init__(emoji=False, **how)


class RunConsole(OwnConsole):
    """Of a command whose work goes on when nobody reads any more what it says, as behind ``| head``: `Console` itself
    would end the process."""

    def on_broken_pipe(self) -> None:
        """Says nothing from now on."""
        self.quiet = True
        with suppress(OSError, ValueError):  # a file that is none of the system's
            own, nowhere = self.file.fileno(), os.open(os.devnull, os.O_WRONLY)
            for unread in (own, *[2] * os.path.sameopenfile(own, 2)):
                os.dup2(nowhere, unread)  # or what else is said there, or flushed at the end, would fail once more
            os.close(nowhere)
        log.warning("nobody reads what is said any more: it goes on")


def print_summary(console: Console, summary: dict[str, Any], folder: Path) -> None:
    """The main numbers, what one should look at, and where the report is."""
    shown = {key: summary[key] for key in (*SHOWN, "error") if key in summary}
    shown = {key: value for key, value in shown.items() if value is not None or not key.startswith(UNSAID)}
    console.print(json.dumps(shown, indent=2, ensure_ascii=False), highlight=False, markup=False, soft_wrap=True)
    if shown.get("reward_last") is not None:
        some = "last ten" if summary["steps"] >= 10 else f"{summary['steps']}"
        console.print(f"reward_last is the mean of the {some} steps", highlight=False)
    print_findings(console, summary)
    report = folder / "report.html"
    if report.is_file():
        console.print(f"report: {report}", highlight=False, markup=False, soft_wrap=True)


def print_findings(console: Console, summary: dict[str, Any]) -> None:
    """What one should look at; nothing where all went well."""
    if summary.get("look_at_this"):
        console.print("look at this:", style="bold yellow")
        for finding in summary["look_at_this"]:
            console.print(f"  - {finding}", highlight=False, markup=False, soft_wrap=True)
