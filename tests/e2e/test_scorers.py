"""A scorer of the user's own joins a run by config alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.pipeline.config import ConfigError, TinyModel, load
from penstock.pipeline.models.tiny import build
from penstock.pipeline.run.summary import steps_of
from penstock.pipeline.tools.rollouts import rollouts
from penstock.protocols.columns import top_columns
from penstock.protocols.packed_groups import unpack_group
from penstock.services.broker.archive import read
from penstock.services.data import open_source
from penstock.services.data.config import SortData
from tests.e2e.runs import QUICKSTART, SHORT, WHOLE, Run, check_promises
from tests.e2e.test_colocated import overlaps, spans


def scorer(folder: Path, **more: str) -> list[str]:
    options = f"timeout_s: 4, options: {{notes: {folder / 'notes'}, scale: 2.0, dies_at: [3], hangs_at: [17]}}"
    written = "{surprise: token}"
    made = f"{{scorer: 'tests.e2e.scorers:Surprise', columns: {written}, reads: [reference], {options}}}"
    loss = "{type: custom, function: 'tests.e2e.scorers:surprised_loss', columns: [surprise, reward/exact_match]}"
    watched = "{function: 'tests.e2e.scorers:watched', weight: 0, columns: [surprise, reward/exact_match]}"
    return [
        f"scorers={{surprise: {made}}}",
        f"trainer.algorithm.loss={loss}",
        f"reward.functions=[{{function: exact_match}}, {watched}]",
    ]


def test_a_scorer_of_the_tests_joins_a_run_is_killed_hangs_and_its_column_arrives_once(tmp_path: Path) -> None:
    run = Run(tmp_path, [*WHOLE, *scorer(tmp_path), "trainer.checkpoint.every=2", "prompts.eval=null"])
    summary = run.wait()
    check_promises(summary)
    assert summary["steps"] == 6 and summary["restarts"] == 2 and summary["groups_dropped"] == 0
    trained = 0
    for batch, _ in read(run.folder):
        for taken in batch.groups:
            trained += 1
            group = unpack_group(taken.experience.data)
            expected = -2.0 * np.concatenate([t.logprobs for t in group.trajectories])
            assert np.array_equal(taken.columns["surprise"], expected)
            sums = [
                float(part.sum())
                for part in np.split(expected, np.cumsum([len(t.tokens) for t in group.trajectories])[:-1])
            ]
            watched = np.array(sums, np.float32) + taken.columns["reward/exact_match"]
            assert np.allclose(taken.columns["reward/watched"], watched, atol=1e-5)
            assert np.array_equal(taken.columns["reward"], taken.columns["reward/exact_match"])
    assert trained == 6 * 8
    asked = (tmp_path / "notes").read_text().split()
    assert asked.count("3") > 1 and asked.count("17") > 1  # there it died and hung, and was asked again
    log = (run.folder / "logs" / "surprise-0.stderr").read_text()
    assert "(scorers.surprise.timeout_s)" in log and "in score_group" in log
    rows = steps_of(run.folder)
    assert all(
        row["seen_surprise"] > 0 and row["surprise_off"] < 1e-5 and row["surprise"] > 0 and "reward/watched" in row
        for row in rows
    )
    assert any("latency/surprise" in row for row in rows) and any("latency/reward/watched" in row for row in rows)


@pytest.mark.chaos
def test_a_teacher_tells_its_whole_distribution_through_a_run(tmp_path: Path) -> None:
    """And sleeps while the trainer works on the same device."""
    prompts = [prompt for _, prompt in zip(range(50), open_source(SortData()), strict=False)]
    build(TinyModel.model_validate({"warm_start": {"steps": 2, "batch": 16}}), prompts, tmp_path / "wise", 1)
    options = f"{{path: {tmp_path / 'wise'}, device: cpu, dtype: float32, top_k: 4}}, gpus: 1, own_gpus: false"
    given = [
        f"scorers={{wise: {{scorer: teacher, columns: {{wise: token}}, options: {options}}}}}",
        "trainer.algorithm={preset: gkd, distill: {teachers: {wise: 1.0}}}", "prompts.eval=null", "trainer.steps=3",
        "run.placement=colocated", "run.log_level=debug",
    ]  # fmt: skip
    run = Run(tmp_path, [*SHORT, *given])
    check_promises(run.wait())
    awake = spans(run, "wise-0", "awake", "asleep")
    assert len(awake) >= 2 and not overlaps(awake, spans(run, "trainer", "at work", "at rest"))
    for batch, _ in read(run.folder):
        for taken in batch.groups:
            group = unpack_group(taken.experience.data)
            sizes = len(group.trajectories), sum(len(t.tokens) for t in group.trajectories), group.sampled
            for column in top_columns("wise", 4, "wise"):
                column.check(taken.columns[column.name], *sizes)
    for row in steps_of(run.folder):
        assert row["teacher_divergence"] > 0 and row["loss"] == pytest.approx(row["teacher_divergence"])
    rows = list(rollouts(run.folder, 2))
    assert len(rows) == 32 and not any(".top4" in name for name in rows[0]), "nobody reads them there"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.algorithm.loss={type: custom, function: 'a:b', columns: [suprise]}"],
         r"trainer.algorithm.loss.columns: no scorer writes a column 'suprise'; did you mean 'surprise'"),
        (["scorers.surprise.columns={surprise: token, reward/exact_match: token}"], "is written by another scorer too"),
        (["scorers={reward: {scorer: 'a:b', columns: {x: token}}}"], "scorers.reward: the name is taken"),
        (["scorers.surprise.reads=[reward/watched]"], "columns that wait for each other can never be written"),
        (["reward.functions=[{function: exact_match}, {function: exact_match}]"], "two functions write the column"),
        (["scorers.surprise.colums={x: token}"], "scorers.surprise.colums: unknown key; did you mean 'columns'"),
    ],
)  # fmt: skip
def test_columns_that_cannot_work_are_told_before_anything_starts(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(QUICKSTART, [*scorer(tmp_path), *overrides])
