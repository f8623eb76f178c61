"""Scorers that are asked for some sources alone: what a config may say, and what a look tells beside."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.pipeline.config import Config, ConfigError, load
from penstock.pipeline.preflight import data, sources
from penstock.pipeline.preflight.report import Report
from penstock.protocols.experience import Prompt

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
MIXED = [
    "prompts.train={type: mix, sources: {sums: {type: sort}, words: {type: sort}}}",
    "prompts.eval={hard: {type: sort}}",
    "trainer.algorithm.kl.coefficient=0",
]
APART = "reward.functions=[{function: exact_match, sources: [sums, hard]}, {function: length, sources: [words]}]"
CUSTOM = "prompts.train={type: custom, function: 'mine:rows'}"
TEACHER = "scorers={t: {scorer: teacher, columns: {t: token}, sources: [sums], options: {path: x, column: t}}}"
TOP = TEACHER.replace("column: t}", "column: t, top_k: 4}")
TAUGHT = "trainer.algorithm.advantage={type: distillation, teachers: {t: 1.0, reference: %s}}"
PLAYED = "rollout.environments={sums: {environment: 'mine:Game'}, hard: {environment: 'mine:Game', max_turns: 2}}"
ENVIRONMENT = "reward.functions=[{function: environment%s}, {function: exact_match, sources: [words]}]"
GDPO = "trainer.algorithm.advantage={type: gdpo, components: {reward/exact_match: 1.0, reward/length: 1.0}}"


def config(*overrides: str) -> Config:
    return load(QUICKSTART, [*MIXED, *overrides])


@pytest.mark.parametrize(
    "overrides",
    [
        [APART],
        [PLAYED, APART],
        [PLAYED, ENVIRONMENT % ", sources: [sums, hard]"],
        [PLAYED, "rollout.environment={environment: 'mine:Other'}", ENVIRONMENT % ""],
        [APART, "prompts.eval_size=0"],
        [APART, CUSTOM, "replay.filter={type: range, column: reward/length}"],
        ["reward.functions=[{function: exact_match}, {function: length, weight: 0, sources: [hard]}]"],
        ["reward.functions=[{function: exact_match}, {function: 'm:f', columns: [reward/length], sources: [sums]}, "
         "{function: length, weight: 0, sources: [sums, words]}]"],
        [APART, "scorers={x: {scorer: 'm:X', columns: {x: trajectory}, reads: [reward]}}"],
        [TEACHER, TAUGHT % "1.0"],
        [TOP, "trainer.algorithm.distill={teachers: {t: 1.0}}"],
        [TEACHER, "trainer.algorithm.teacher_advantage={teachers: {t: 1.0}}"],
        ["reward.functions=[{function: exact_match, weight: 0}, {function: length, weight: 0}, "
         "{function: 'm:f', sources: [sums]}]", GDPO],
    ],
)  # fmt: skip
def test_what_every_prompt_has_may_be_asked(overrides: list[str]) -> None:
    assert config(*overrides).columns.by_source


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([APART.replace("sums", "sum")], "functions.0.sources: no prompt is of a source 'sum'; did you mean 'sums'?"),
        ([APART, "prompts.eval=null"], "there are sums (prompts.train), words (prompts.train)"),
        ([APART, "prompts.train={type: sort}"], "there are hard (prompts.eval.hard)"),
        ([APART.replace(", hard", "")], "prompts.eval.hard: no reward is made for the source 'hard'"),
        (["reward.functions=[{function: exact_match, sources: [sums, hard]}, {function: length, weight: 0}]",
          "trainer.algorithm.constraints=[{column: reward/length, limit: 9}]"],
         "prompts.train: no reward is made for the source 'words'"),
        ([APART.replace("[words]", "[words], weight: 0")], "prompts.train: no reward is made for the source 'words'"),
        (["prompts.train={type: sort}", "reward.functions=[{function: exact_match, sources: [hard]}]"],
         "prompts.train: no reward is made for rows without a source"),
        ([APART, GDPO], "components: reward/exact_match is not asked for the source 'words', and what is learned from"),
        ([APART, CUSTOM, GDPO], "reward/exact_match is not asked for whatever source a row may name"),
        ([APART, "trainer.algorithm.constraints=[{column: reward/length, limit: 9}]"],
         "trainer.algorithm.constraints.0.column: reward/length is not asked for the source 'sums'"),
        (["reward.functions=[{function: exact_match}, {function: 'm:f', columns: [reward/length]}, "
          "{function: length, sources: [sums, words]}]"],
         "reward.functions.1.columns: reward/length is not asked for the source 'hard', and its reader is"),
        ([APART, "scorers={x: {scorer: 'm:X', columns: {x: token}, reads: [reward/length]}}"],
         "scorers.x.reads: reward/length is not asked for the source 'sums'"),
        ([TEACHER, TAUGHT % "0.0"], "advantage.teachers: none of them is asked for the source 'words'"),
        ([TOP, "trainer.algorithm={preset: gkd, loss: null, distill: {teachers: {t: 1.0}}}"],
         "distill.teachers: none of them is asked for the source 'words'"),
        ([TEACHER, "trainer.algorithm={advantage: {type: none}, teacher_advantage: {teachers: {t: 1.0}}}"],
         "teacher_advantage.teachers: none of them is asked for the source 'words'"),
        ([PLAYED.replace("sums", "sum")], "rollout.environments: no prompt is of a source 'sum'; did you mean 'sums'?"),
        ([PLAYED, ENVIRONMENT % ""], "reward.functions.0: environment stands for what an environment gave, and the"),
        ([TEACHER.replace("sums", "sum")], "scorers.t.sources: no prompt is of a source 'sum'"),
    ],
)  # fmt: skip
def test_what_some_prompts_lack_is_told_with_its_key(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(*overrides)
    assert message in str(caught.value)


def test_a_look_says_what_a_filter_leaves_alone_and_which_sources_no_row_has() -> None:
    report = Report()
    sources.look(config(APART, "replay.filter={type: range, column: reward/exact_match}"), report)
    assert report.notes == [
        "replay.filter.column: reward/exact_match is not asked for the sources 'words', whose groups are all kept"
    ]
    row = Prompt(index=0, text="1+1=", source="words")
    report = Report(rows={"words": row, "hard": row}, trained={"words"})
    sources.look(config(APART, CUSTOM), report)
    assert not report.problems
    assert report.notes == [
        "reward/exact_match: it is asked for the sources 'sums', which none of the first rows is of"
    ]


HELD_OUT = "prompts.eval={aime: {type: custom, function: 'mine:rows'}, hard: {type: sort}}"
TYPO = "reward.functions=[{function: exact_match, sources: [sumz]}, {function: length, weight: -0.01}]"
NOT_AIME = APART.replace("hard]", "hard, easy]")


@pytest.mark.parametrize(
    ("overrides", "evaluated", "problems", "notes"),
    [
        ([TYPO], {"aime": {"aime"}, "hard": {"hard"}}, ["no prompt is of a source 'sumz'; did you mean 'sums'?"], []),
        ([TYPO.replace("sumz", "olympic")], {"aime": {"aime", "olympic"}, "hard": {"hard"}}, [], []),
        ([TYPO, "prompts.eval_size=0"], {}, [], ["asked for the sources 'sumz', which none of the first rows is of"]),
        ([NOT_AIME], {"aime": {"aime", "easy"}, "hard": {"hard"}},
         ["prompts.eval.aime: no reward is made for rows of the source 'aime'"], []),
        ([NOT_AIME, CUSTOM], {"aime": {"easy"}, "hard": {"hard"}}, [], ["which none of the first rows is of"]),
    ],
)  # fmt: skip
def test_a_custom_evaluation_set_says_which_sources_it_has(
    overrides: list[str], evaluated: dict[str, set[str]], problems: list[str], notes: list[str]
) -> None:
    report = Report(trained={"words"}, evaluated=evaluated)
    sources.look(config(HELD_OUT, *overrides), report)
    for said, expected in ((report.problems, problems), (report.notes, notes)):
        assert len(said) == len(expected) and all(words in found for words, found in zip(expected, said, strict=True))


@pytest.mark.parametrize(("best", "noted"), [("words", False), ("words/pass@2", False), ("wrods", True)])
def test_a_source_by_which_no_version_can_be_the_best_is_told_of(best: str, noted: bool) -> None:
    several = "prompts.eval_sampling={held_out: {n: 2, temperature: 1.0}}"
    held_out = "prompts.eval={held_out: {type: mix, sources: {sums: {type: sort}, words: {type: sort}}}}"
    report = Report()
    data.look(config(held_out, several, f"prompts.best_by=held_out/source/{best}"), report)
    assert noted == any(f"is of a source {best}, but of sums, words" in note for note in report.notes)
