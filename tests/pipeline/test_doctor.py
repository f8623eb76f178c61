"""`penstock doctor engine` on data as it is: some rows are no prompts, and some prompts are too long."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from penstock.pipeline.config import load
from penstock.pipeline.tools.doctor_engine import examine_engine

CONFIG = """
model: {{type: tiny, layers: 1, warm_start: {{steps: 0}}}}
prompts: {{train: {{type: hub, path: json, files: [{rows}], prompt_key: question, truth_key: answer, chat: false}}}}
rollout:
  engine: {{type: torch, max_length: 40}}
  sampling: {{n: 2, max_new_tokens: 8}}
reward: {{functions: [{{function: exact_match}}]}}
"""


def examined(folder: Path, questions: list[str | None]) -> tuple[bool, str]:
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"question": question, "answer": "2"}) for question in questions))
    (folder / "config.yaml").write_text(CONFIG.format(rows=rows))
    console = Console(width=300, record=True, file=io.StringIO())
    good = examine_engine(console, load(folder / "config.yaml"), 3)
    return good, console.export_text()


def test_rows_that_a_run_would_drop_are_no_fault_of_the_engine(tmp_path: Path) -> None:
    good, said = examined(tmp_path, ["1+1=", None, "1+" * 30 + "1=", "2+3=", "4+5="])
    assert good, said
    assert said.count("prompt 2: not asked") == 1 and "4 answers" in said, said


def test_an_engine_that_was_asked_nothing_is_not_called_right(tmp_path: Path) -> None:
    good, said = examined(tmp_path, ["1+" * 30 + "1="])
    assert not good and "takes none of the prompts" in said, said
