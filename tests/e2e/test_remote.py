"""The canary of engines that can score only what serves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import SHORT, Run, check_promises


@pytest.mark.parametrize("transport", ["gloo", pytest.param("shm", marks=pytest.mark.chaos)])
def test_a_version_that_is_wrong_inside_the_engine_ends_the_rollout_and_nothing_of_it_is_trained_on(
    tmp_path: Path, transport: str
) -> None:
    flag = tmp_path / "wrong-once"
    engine = f"{{type: plugin, name: 'tests.e2e.remote:Remote', options: {{flag: {flag}}}}}"
    run = Run(tmp_path, [*SHORT, f"rollout.engine={engine}", f"weights.transport={transport}", "trainer.steps=30"])
    summary = run.wait()
    check_promises(summary)
    assert flag.exists() and summary["restarts"] == 1
    log = (run.folder / "logs" / "trainer.jsonl").read_text()
    assert "canary's log-probabilities differ" in log  # the trainer heard why, and from whom
    said = [json.loads(line) for line in (run.folder / "logs" / "supervisor.jsonl").read_text().splitlines()]
    (death,) = [line for line in said if line["event"] == "died"]
    assert "CanaryError" in death["last_words"]
    told = [json.loads(line) for line in (run.folder / "logs" / f"{death['child']}.jsonl").read_text().splitlines()]
    crashed = next(index for index, line in enumerate(told) if line["event"] == "crashed")
    wrong = int(flag.read_text())
    assert not any(line["event"] == "version loaded" and line["version"] == wrong for line in told[:crashed])
