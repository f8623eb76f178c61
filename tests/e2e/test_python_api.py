"""`penstock.Trainer` and `penstock.Run`, on real runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import penstock
from tests.e2e.runs import QUICKSTART, ROOT, SHORT, check_promises

pytestmark = pytest.mark.slow
FEW: dict[str, Any] = {key: int(value) for key, value in (word.split("=") for word in SHORT)}


def test_a_run_is_started_stopped_and_gone_on_with(tmp_path: Path) -> None:
    seen: list[int] = []
    trainer = penstock.Trainer(QUICKSTART, name="run", folder=tmp_path, overrides=FEW | {"trainer.steps": 400})
    run = trainer.start()
    assert run.running and run.folder == tmp_path / "run"
    with pytest.raises(TimeoutError, match="it goes on"):
        run.wait(0.5)
    while len(run.steps) < 3:
        time.sleep(0.1)
    assert run.status()["phase"] == "training"
    again = penstock.Run(run.folder)  # from another process, say
    assert again.running
    summary = again.stop()
    assert summary is not None and summary["outcome"] == "interrupted" and not again.running
    assert run.wait(30) == summary
    done = summary["steps"]
    assert again.checkpoint is not None and again.checkpoint.name == f"step-{done:06d}"
    longer = again.resume({"trainer.steps": done + 4})
    summary = longer.wait(200, on_step=lambda row: seen.append(row["step"]))
    check_promises(summary)
    assert summary["steps"] == done + 4 and seen == list(range(done, done + 4))
    assert list(longer.metrics.index) == list(range(done + 4)) and "reward" in longer.metrics


def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    trainer = penstock.Trainer(QUICKSTART, name="run", folder=tmp_path, reward="nowhere:judge")
    with pytest.raises(penstock.RunFailed, match="reward.functions.0.function: cannot load 'nowhere:judge'"):
        trainer.train()


@pytest.mark.chaos
def test_the_example_trains_on_its_own_reward(tmp_path: Path) -> None:
    """A script with functions of its own, as a user runs it."""
    code = (ROOT / "examples" / "python_api.py").read_text().replace("name=name,", f'name=name, folder="{tmp_path}",')
    (tmp_path / "mine.py").write_text(code.replace("steps: int = 60", "steps: int = 8"))
    env = os.environ | {"COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "mine.py")], cwd=ROOT, capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr[-3000:]
    run = penstock.Run(tmp_path / "from-python")
    assert run.summary is not None
    check_promises(run.summary)
    assert {"reward/right_places"} <= set(run.steps[0]) and "reward 0." in done.stdout
    (written,) = (tmp_path / "from-python.script").glob("script_functions_*.py")
    assert "def right_places" in written.read_text()


@pytest.mark.chaos
def test_the_same_in_a_notebook(tmp_path: Path) -> None:
    """Executed by Jupyter's own client, with a function that a cell defines."""
    cells = [
        "import re\n\nimport penstock\n\nLETTERS = re.compile('[a-z]')",
        "def letters(response: str) -> float:\n    return len(LETTERS.findall(response)) / 10",
        f"run = penstock.Trainer({str(QUICKSTART)!r}, name='run', folder={str(tmp_path)!r}, reward=letters, "
        f"overrides={FEW | {'trainer.steps': 3}!r}).train()",
        "assert run.summary['groups_lost'] == 0\nrun.metrics[['reward/letters']]",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute(cwd=str(ROOT))
    (shown,) = [each for each in notebook.cells[-1].outputs if each.output_type == "execute_result"]
    assert "reward/letters" in shown["data"]["text/html"]
