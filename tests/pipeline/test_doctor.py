"""`penstock doctor engine` on data as it is: some rows are no prompts, and some prompts are too long."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from penstock.pipeline.config import load
from penstock.pipeline.tools.doctor_engine import examine_engine
from tests import seeing

CONFIG = """
model: {{type: tiny, layers: 1, warm_start: {{steps: 0}}}}
prompts: {{train: {{type: hub, path: json, files: [{rows}], prompt_key: question, truth_key: answer, chat: false}}}}
rollout:
  engine: {{type: torch, max_length: 40}}
  sampling: {{n: 2, max_new_tokens: 8}}
reward: {{functions: [{{function: exact_match}}]}}
"""


SHOWN = """
model: {{type: pretrained, path: "{model}", dtype: float32}}
prompts: {{train: {{type: custom, function: "tests.shown:colours", pictures: true}}}}
rollout:
  engine: {{type: torch, max_length: 64}}
  sampling: {{n: 2, max_new_tokens: 4}}
reward: {{functions: [{{function: exact_match}}]}}
"""


def examined(folder: Path, questions: list[str | None]) -> tuple[bool, str]:
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"question": question, "answer": "2"}) for question in questions))
    return looked_at(folder, CONFIG.format(rows=rows))


def looked_at(folder: Path, config: str) -> tuple[bool, str]:
    (folder / "config.yaml").write_text(config)
    console = Console(width=300, record=True, file=io.StringIO())
    good = examine_engine(console, load(folder / "config.yaml"), 3)
    return good, console.export_text()


def test_rows_that_a_run_would_drop_are_no_fault_of_the_engine(tmp_path: Path) -> None:
    good, said = examined(tmp_path, ["1+1=", None, "1+" * 30 + "1=", "2+3=", "4+5="])
    assert good, said
    assert said.count("prompt 2: not asked") == 1 and "4 answers" in said, said


def test_pictures_are_compared_too(tmp_path: Path) -> None:
    seeing.write("qwen3_vl", tmp_path / "model")
    good, said = looked_at(tmp_path, SHOWN.format(model=tmp_path / "model"))
    assert good and "3 of 3 prompts show some" in said and said.count("6 answers") == 2, said


def test_an_engine_that_was_asked_nothing_is_not_called_right(tmp_path: Path) -> None:
    good, said = examined(tmp_path, ["1+" * 30 + "1="])
    assert not good and "takes none of the prompts" in said, said
