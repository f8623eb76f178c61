"""The shipped configs' own loading code, on a model and data made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.pipeline.config import load
from penstock.pipeline.models.make_tiny import make_tiny
from penstock.services.data import DataError, open_source
from penstock.services.data.config import HubData
from tests.e2e.runs import QUICKSTART, ROOT, SHORT, Run, check_promises

ROWS = [
    {"question": f"what is {a}+{b}?", "answer": f"{a} plus {b} is #### {a + b}"} for a in range(8) for b in range(8)
]
CHAT = (
    "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)


def write_rows(folder: Path, kind: str) -> Path:
    import pandas

    if kind == "json":
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        path = folder / "rows.parquet"
        pandas.DataFrame(ROWS).to_parquet(path)
    return path


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_a_local_file_is_read_as_the_hub_dataset_would_be(tmp_path: Path, kind: str) -> None:
    path = write_rows(tmp_path, kind)
    source = open_source(
        HubData(path=kind, files=[str(path)], prompt_key="question", truth_key="answer", system="be brief")
    )
    assert len(source) == 64
    assert source[9].messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "what is 1+1?"},
    ]
    assert source[9].truth == "1 plus 1 is #### 2"
    with pytest.raises(DataError, match="no column 'prompt'.* question, answer"):
        open_source(HubData(path=kind, files=[str(path)]))


def test_rows_that_are_no_prompts_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "fine"}\n{"prompt": ""}\n')
    source = open_source(HubData(path="json", files=[str(path)]))
    assert source[0].messages
    with pytest.raises(DataError, match="row 1: the prompt is empty"):
        source[1]


@pytest.mark.chaos
def test_the_hugging_face_config_trains_a_local_model_on_a_local_file(tmp_path: Path) -> None:
    """configs/gsm8k.yaml with nothing changed but names and sizes; one row is bad, and costs only itself."""
    rows = write_rows(tmp_path, "json")
    with rows.open("a") as file:
        file.write('{"question": "", "answer": "no question"}\n')
    make_tiny(load(QUICKSTART, SHORT), tmp_path)
    tokenizer = tmp_path / "model" / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"chat_template": CHAT}))
    data = f"{{type: hub, path: json, files: ['{rows}'], prompt_key: question, truth_key: answer}}"
    overrides = [
        f"model.path={tmp_path / 'model'}", "model.dtype=float32", f"prompts.train={data}", f"prompts.eval={data}",
        "prompts.eval_size=8", "trainer.steps=10", "gate.groups_per_step=8", "rollout.engine.max_length=128",
        "rollout.sampling.max_new_tokens=8", "rollout.sampling.n=4", "trainer.optimizer.lr=1e-3",
    ]  # fmt: skip
    run = Run(tmp_path, overrides, ROOT / "configs" / "gsm8k.yaml")
    summary = run.wait()
    check_promises(summary)
    assert summary["steps"] == 10 and summary["groups_dropped"] >= 1
    samples = (run.folder / "samples.jsonl").read_text()
    assert "what is" in samples


@pytest.mark.chaos
def test_reasoning_gym_tasks_are_scored_by_their_own_scorers(tmp_path: Path) -> None:
    overrides = ["trainer.steps=4", "gate.groups_per_step=8", "prompts.eval_size=8", "model.warm_start.steps=5"]
    summary = Run(tmp_path, overrides, ROOT / "configs" / "reasoning-gym.yaml").wait()
    check_promises(summary)
    assert summary["steps"] == 4 and summary["rewards_failed"] == 0
