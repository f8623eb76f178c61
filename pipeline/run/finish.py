"""What is written once a run is over: summary.json and report.html."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from penstock.pipeline.page.build import write
from penstock.pipeline.run.folder import make_folder, run_name
from penstock.pipeline.run.lock import is_at_work
from penstock.pipeline.run.resume import committed
from penstock.pipeline.run.summary import finite, mean_of_last, rounded, steps_of, summarize
from penstock.protocols.messages import LedgerReply
from penstock.protocols.run_lock import read_summary
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.files import write_whole

log = structlog.get_logger()

REPORT_TOKENS = 50_000
"""Of rollouts that report.html has token by token: about 50 bytes each; `penstock page --out` writes all."""
REPORT_LETTERS = 5_000_000
"""Of rollouts that it has as text."""
REPORT_PICTURES = 2_000_000
"""Letters of pictures that they show."""


def conclude(
    folder: Path,
    state: dict[str, Any],
    ledger: LedgerReply,
    restarts: int,
    outcome: str,
    error: str | None = None,
) -> dict[str, Any]:
    """Writes both; returns the summary. ``outcome`` is complete, interrupted or failed."""
    summary = summarize(folder, state, ledger, restarts, outcome)
    if error:
        summary["error"] = error
    _write(folder, summary)
    return summary


def give_up(folder: Path, error: str) -> None:
    """Writes both where no broker is left to ask, of what lies in the run's folder: that it has failed, of what, and
    after how many steps. Nothing where an outcome is written already, or cannot be, as on a full disk."""
    if read_summary(folder) is not None:
        return
    try:
        found = {"run": run_name(folder), "outcome": "failed", "steps": committed(folder), "error": error}
        rewards = [row["reward"] for row in steps_of(folder)]
        ends = {"reward_first": rounded(rewards[0]), "reward_last": mean_of_last(rewards)} if rewards else {}
        _write(folder, dict(finite(found | ends)))
    except OSError as failed:
        log.error("no summary", error=str(failed))


@contextmanager
def told(folder: Path, tell: bool) -> Iterator[None]:
    """With ``tell``, what a run in ``folder`` is refused for inside is its outcome: whoever waits to join it goes by
    that. Not of a run that is at work, or that has come to its end."""
    try:
        yield
    except SetupError as error:
        if tell and not is_at_work(folder):
            make_folder(folder, "--folder")
            if (read_summary(folder) or {}).get("outcome") in ("interrupted", "failed"):  # as it was before this try
                (folder / "summary.json").unlink()
            give_up(folder, str(error))
        raise


def _write(folder: Path, summary: dict[str, Any]) -> None:
    for gone in (folder / "gateways").glob("*.json"):  # of gateways that were killed: agents look there
        gone.unlink(missing_ok=True)
    # In one piece: who finds it knows that the run is over.
    write_whole(folder / "summary.json", json.dumps(summary, indent=2) + "\n", durable=True)
    if not (folder / "config.yaml").is_file():  # refused before it began: there is nothing to show
        return
    try:  # last: it is large, and who is killed meanwhile leaves a summary
        write([folder], folder / "report.html", REPORT_TOKENS, REPORT_LETTERS, REPORT_PICTURES)
    except Exception as failed:  # a page that cannot be drawn is no reason to fail
        log.exception("no report", error=str(failed))
