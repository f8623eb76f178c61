"""A rollout that hangs, and does not die of it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.runs import SHORT, Run, check_promises


def test_a_rollout_whose_engine_hangs_is_ended_says_where_it_was_and_begins_again(tmp_path: Path) -> None:
    engine = f"{{type: plugin, name: 'tests.e2e.hanging:Hanging', options: {{flag: {tmp_path / 'hung'}}}}}"
    run = Run(tmp_path, [*SHORT, f"rollout.engine={engine}", "rollout.timeout_s=4", "prompts.eval=null"])
    summary = run.wait()
    check_promises(summary)
    assert summary["restarts"] == 1 and summary["steps"] == 6
    assert "hanging.py" in (run.folder / "logs" / "rollout-0.stderr").read_text()
    said = [json.loads(line) for line in (run.folder / "logs" / "supervisor.jsonl").read_text().splitlines()]
    (death,) = [line for line in said if line["event"] == "died"]
    assert "rollout.timeout_s" in death["last_words"]
