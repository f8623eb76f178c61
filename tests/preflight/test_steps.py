"""Steps that prompts do not suffice for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from penstock.pipeline.config import ConfigError, dump, load, parse
from penstock.pipeline.preflight import data
from penstock.pipeline.preflight.given import TRAIN, look_at_rows
from penstock.pipeline.preflight.report import Report
from penstock.pipeline.preflight.steps import done_in
from penstock.pipeline.run.resume import resumed
from penstock.pipeline.run.start import laid_out
from penstock.protocols.experience import Prompt

FILE = """
model: {type: tiny}
prompts: {train: {type: sort, size: 1000}}
gate: {groups_per_step: 32}
reward: {functions: [{function: exact_match}]}
trainer: {steps: 100000}
"""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["prompts.epochs=2", "trainer.optimizer.schedule=cosine"],
            "trainer.steps=100000: .*; set it to 63, or to null",
        ),
        (["prompts.epochs=2"], None),
        (
            ["prompts.epochs=50", "trainer.steps=100"],
            "trainer.steps=100: the run ends there.*set trainer.steps=1563, or null, for all of them",
        ),
        (["trainer.optimizer.schedule=cosine"], None),
        (["prompts.epochs=2", "trainer.optimizer.schedule=linear", "trainer.steps=64"], None),
    ],
)
def test_a_learning_rate_that_would_not_fall_is_told_of(tmp_path: Path, given: list[str], said: str | None) -> None:
    (tmp_path / "run.yaml").write_text(FILE)
    report = Report()
    data.look(load(tmp_path / "run.yaml", given), report)
    assert not report.problems and len(report.notes) == bool(said)
    if said:
        (note,) = report.notes
        assert re.fullmatch(said, note), note


def test_rows_with_an_answer_and_no_truth_are_told_of_where_answers_are_not_given() -> None:
    rows = [Prompt(index=0, text="1+1=", answer="2")]
    for given, told in ({}, True), ({"rollout": {"given": {"answers": 1}}}, False):
        config, report = parse(yaml.safe_load(FILE) | given), Report()
        look_at_rows(config, TRAIN, rows, report)
        assert bool(report.notes) == told and not report.problems
        assert not told or "if that is meant, call it truth" in report.notes[0]


def test_steps_may_be_as_many_as_the_epochs_make(tmp_path: Path) -> None:
    """They are counted when a run begins, and told; a run that goes on keeps them, unless epochs are others."""
    file, folder = tmp_path / "run.yaml", tmp_path / "run"
    file.write_text(FILE.replace("100000", "null"))
    with pytest.raises(ConfigError, match="set prompts.epochs, e.g. 1, or give a number of steps"):
        laid_out(str(file), [], None)
    config, _, told = laid_out(str(file), ["prompts.epochs=2"], None)
    assert config.trainer.steps == 63
    assert told == ["changed: trainer.steps: null → 63 (prompts.epochs=2 of 1,000 prompts, 32 groups a step)"]
    report = Report()
    data.look(config, report)
    assert not report.problems and not report.notes
    folder.mkdir()
    (folder / "config.yaml").write_text(dump(config))
    (folder / "ledger.jsonl").write_text("")
    for given, steps in (([], 63), (["trainer.steps=null"], 63), (["prompts.epochs=3", "trainer.steps=null"], 94)):
        assert resumed(folder, None, given)[0].trainer.steps == steps
    assert resumed(folder, file, ["prompts.epochs=2"])[0].trainer.steps == 63, "the file still leaves them open"


def test_steps_of_another_size_follow_those_that_are_done(tmp_path: Path) -> None:
    """Of 2,000 groups the first 8 steps had 32 each: what is left makes 109 steps of 16."""
    file, folder, smaller = tmp_path / "run.yaml", tmp_path / "run", ["prompts.epochs=2", "gate.groups_per_step=16"]
    file.write_text(FILE.replace("100000", "null"))
    folder.mkdir()
    (folder / "config.yaml").write_text(dump(laid_out(str(file), ["prompts.epochs=2"], None)[0]))
    taken = [json.dumps({"step": step, "groups": [*range(32 * step, 32 * step + 32)]}) for step in (*range(8), 7)]
    (folder / "ledger.jsonl").write_text("\n".join(taken) + "\n")
    for given in ((None, [*smaller, "trainer.steps=null"]), (file, smaller)):
        config = resumed(folder, *given)[0]
        assert config.trainer.steps == 8 + 109
        report = Report(done=done_in(folder))
        data.look(config, report)
        assert not report.notes, "these are all that the prompts make"
