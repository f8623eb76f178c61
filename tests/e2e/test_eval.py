"""`penstock eval`: a checkpoint alone, over the whole pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from penstock.pipeline.config import Config, TinyModel, load
from penstock.pipeline.models.tiny import build
from penstock.pipeline.run import evaluate as evaluation
from penstock.pipeline.tools.merge import merge
from penstock.services.data.config import SortData
from penstock.services.data.sort import SortSource
from penstock.services.runtime.errors import SetupError
from tests import warm
from tests.e2e.runs import QUICKSTART

SETS = "prompts.eval={short: {type: sort, max_letters: 4}, long: {type: sort, min_letters: 8}}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows something, but not much."""
    folder = tmp_path_factory.mktemp("model")
    build(
        TinyModel(hidden_size=64, warm_start={"steps": 80, "corrupted": 0.3}), SortSource(SortData(), False), folder, 0
    )  # type: ignore[arg-type]
    return folder


def evaluate(checkpoint: Path, folder: Path, name: str, *overrides: str) -> tuple[str, dict[str, float]]:
    where = [f"run.folder={folder}", f"run.name={name}"]
    done = warm.run("eval", str(checkpoint), str(QUICKSTART), *where, *overrides, seconds=150)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["eval"] and not list((folder / name).glob("checkpoints/*/model*"))
    return done.stdout, rows[0]["sets"]


def test_sets_are_answered_as_they_ask_for_and_alike_each_time(checkpoint: Path, tmp_path: Path) -> None:
    asked = (SETS, "prompts.eval_size=24", "prompts.eval_sampling={short: {n: 4, temperature: 1.0}}")
    said, found = evaluate(checkpoint, tmp_path, "one", *asked)
    assert found.keys() == {"short", "long", "short/pass@1", "short/pass@2", "short/pass@4", "short/maj@4"}
    assert found["short/pass@1"] == pytest.approx(found["short"])
    assert 0 < found["short/pass@1"] < found["short/pass@4"] <= 1
    assert "pass@4" in said and "maj@4" in said and f"{found['short']:.4f}" in said
    assert (
        "tok/s" in said and "step 0/0" not in said and f"folder, one of its own for each evaluation: {tmp_path}" in said
    )
    said, again = evaluate(checkpoint, tmp_path, "two", *asked, "--json")
    assert again == pytest.approx(found)
    told = json.loads(said)
    assert told["folder"] == str(tmp_path / "two") and told["found"].items() >= again.items()


def test_nothing_to_evaluate_on_is_told(checkpoint: Path, tmp_path: Path) -> None:
    told = warm.run("eval", str(checkpoint), str(QUICKSTART), "prompts.eval=null", f"run.folder={tmp_path}")
    assert told.returncode == 2 and "prompts.eval: there is nothing to evaluate on" in told.stderr


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configs of evaluations, which do not begin."""
    configs: list[Config] = []

    def begun(_console: Console, file: str, overrides: list[str], *_: object) -> int:
        configs.append(load(Path(file), overrides))
        return 0

    monkeypatch.setattr(evaluation, "start", begun)
    return configs


def test_what_training_alone_needs_is_no_hindrance(tmp_path: Path, read: list[Config]) -> None:
    model = tmp_path / "my best å"
    model.mkdir()
    given = ["trainer.algorithm.kl.coefficient=0.01", "reference.refresh_every=50"]
    assert evaluation.evaluate(Console(), str(model), QUICKSTART, given) == 0
    assert not read[0].with_reference and (read[0].run.name or "").startswith("eval-my-best-")


def test_prompts_are_told_as_in_training(tmp_path: Path, read: list[Config]) -> None:
    trained = "model={type: pretrained, path: some/model, chat_template_kwargs: {enable_thinking: false}}"
    assert evaluation.evaluate(Console(), str(tmp_path), QUICKSTART, [trained]) == 0
    assert read[0].template == {"enable_thinking": False}
    assert read[0].model.path == str(tmp_path)  # type: ignore[union-attr]


def test_its_name_is_its_own_and_not_that_of_the_run_which_made_the_checkpoint(
    tmp_path: Path, read: list[Config]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(QUICKSTART.read_text() + "\nrun: {name: first}\n")
    for given in ([], ["run={folder: elsewhere}"], ["run.name=mine"], ["run={name: mine}"]):
        assert evaluation.evaluate(Console(), str(tmp_path), file, given) == 0
    names = [config.run.name or "" for config in read]
    assert all(name.startswith("eval-") for name in names[:2]) and names[2:] == ["mine", "mine"]


def test_the_base_of_an_adapter_is_found_where_its_run_was_moved(tmp_path: Path, read: list[Config]) -> None:
    run = tmp_path / "moved"
    adapter = run / "checkpoints" / "step-000010"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text(
        json.dumps({"r": 4, "lora_alpha": 8, "base_model_name_or_path": str(tmp_path / "gone" / "model")})
    )
    with pytest.raises(SetupError, match="base_model_name_or_path in .*adapter_config.json"):
        evaluation.evaluate(Console(), str(adapter), QUICKSTART, [])
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    assert evaluation.evaluate(Console(), str(adapter), QUICKSTART, []) == 0
    assert read[0].model.path == str(run / "model")  # type: ignore[union-attr]
    with pytest.raises(SetupError, match="no such folder"):
        merge(tmp_path / "mistyped", tmp_path / "out")
