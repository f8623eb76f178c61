"""The prompts: every source opened, its first rows looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.pipeline.config import Config, TinyModel
from penstock.pipeline.models.characters import characters_of
from penstock.pipeline.preflight import given, told_tools, unshown
from penstock.pipeline.preflight.report import Report
from penstock.pipeline.preflight.steps import steps_made
from penstock.protocols import wire
from penstock.protocols.columns import SOURCE
from penstock.protocols.experience import Prompt
from penstock.services.data import DataError, open_source
from penstock.services.data.answers import answer_of
from penstock.services.data.config import DataConfig, MixData, says_sources
from penstock.services.data.mixture import Mixture
from penstock.services.data.source import PromptSource
from penstock.services.modeling.lengths import longest_sequence
from penstock.services.rollout.config import PluginEngineConfig

ROWS = 64
"""So many rows of each source are looked at."""
SHORT = 3
"""Characters of an answer: shuffled, a shorter one is often the same."""
FEW = 0.9
"""Less than this share of the steps is far from all."""


def look(config: Config, report: Report) -> None:
    """Adds to ``report`` what is found; its ``row`` is a usable prompt."""
    rows = _look_at(config, config.prompts.train, "prompts.train", False, report)
    _compare_steps(config, report)
    report.row = next(iter(rows), None)
    report.trained = {prompt.source for prompt in rows}
    given.look_at_rows(config, given.TRAIN, rows, report)
    if config.rollout.all_given:
        report.rows.clear()  # rewards are of evaluations alone
    if config.prompts.eval_size:
        for name, source in config.prompts.eval.items():
            # Sources that only rows name are known once all that are asked were read.
            asked = config.columns.by_source or config.prompts.best_part.startswith(SOURCE)
            every = asked and says_sources(source)
            most = max(ROWS, config.prompts.eval_size) if every else ROWS
            if held_out := _look_at(config, source, f"prompts.eval.{name}", True, report, name, most):
                report.evaluated[name] = {prompt.source or name for prompt in held_out}
                report.notes += _unseen(config, name, report.evaluated[name])
                report.held_out[name] = held_out[:ROWS]
        for name, source in config.prompts.eval_given.items():
            key = f"prompts.eval_given.{name}"
            given.look_at_rows(config, key, _look_at(config, source, key, True, report, None), report)
    if config.prompts.eval_every and not config.prompts.eval and not config.prompts.eval_given:
        report.notes.append(
            f"prompts.eval_every={config.prompts.eval_every}: nothing is evaluated; give prompts.eval or "
            "prompts.eval_given, or leave it out"
        )
    model = config.model
    if isinstance(model, TinyModel) and rows:
        told_tools.look_at_tiny(rows, report)
        if model.warm_start.steps:
            try:
                _look_at_warm_start(config, [answer_of(prompt) for prompt in rows], report)
            except ValueError as error:
                if str(error) not in report.problems:  # `_look_at` may have found the same
                    report.problems.append(str(error))
        sizes = [len(prompt.as_text()) for prompt in rows]  # its tokens are characters
        check_length(config, sizes, report, model.max_length)


def _look_at_warm_start(config: Config, answers: list[str], report: Report) -> None:
    """Says where a tiny model's warm start shows it the ``answers``, which the run is to find."""
    short = sum(len(answer) < SHORT for answer in answers)
    assert isinstance(config.model, TinyModel)
    corrupted = config.model.warm_start.corrupted
    if config.rollout.all_given or report.done.steps:  # it was made long ago
        return
    if short > len(answers) / 2:
        why = (
            f"{short} of the first {len(answers)} answers have less than {SHORT} characters, and shuffling hides little"
        )
    elif config.rollout.all_environments and corrupted < 1:
        why = f"the model is shown truths of rows as answers, {100 * (1 - corrupted):.0f} % of them as they are"
    else:
        return
    report.notes.append(
        f"model.warm_start: {why} (model.warm_start.corrupted={corrupted:g}), so it may know some by heart before the "
        "run begins; set model.warm_start.steps=0 where it should know none"
    )


def _compare_steps(config: Config, report: Report) -> None:
    """Says where prompts end long before the step at which the learning rate would have fallen, or long after the last
    one."""
    epochs, steps, optimizer = config.prompts.epochs, config.trainer.counted_steps, config.trainer.optimizer
    given = steps_made(config, report.sizes.get("prompts.train", 0), report.done)
    if given > steps:
        report.notes.append(
            f"trainer.steps={steps}: the run ends there, and prompts.epochs={epochs} of prompts.train would make "
            f"{given:,} steps of {config.gate.groups_per_step} groups; set trainer.steps={given}, or null, for "
            "all of them"
        )
    if given and given < FEW * steps and optimizer.schedule != "constant":
        report.notes.append(
            f"trainer.steps={steps}: prompts.epochs={epochs} of prompts.train makes {given:,} steps of "
            f"{config.gate.groups_per_step} groups, and the learning rate falls over trainer.steps "
            f"(trainer.optimizer.schedule={optimizer.schedule}); set it to {given}, or to null"
        )


def _unseen(config: Config, name: str, sources: set[str]) -> Iterator[str]:
    """Where the best version is that of a source that no row of the evaluation set ``name`` has shown, of those that
    were read."""
    told = config.prompts.best_part
    asked = told.removeprefix(SOURCE).split("/pass@")[0].split("/maj@")[0]
    if config.prompts.best_set == name and told.startswith(SOURCE) and asked not in sources - {name}:
        yield (
            f"prompts.best_by={config.prompts.best_by}: no row of prompts.eval.{name} that was read is of a source "
            f"{asked}, but of {', '.join(sorted(sources))}; without one no version is the best, or kept as that"
        )


def _look_at(
    config: Config, source: DataConfig, key: str, held_out: bool, report: Report, counts_to: str | None = "",
    rows: int = ROWS,
) -> list[Prompt]:  # fmt: skip
    """The usable ones of the first ``rows``. One that says no source of its own ``counts_to`` this one; None: rewards
    are not asked of any."""
    with report.collect():
        prompts = open_source(source, held_out, key)
        if not len(prompts):
            raise DataError(f"{key}: the data source has no rows")
        usable, why = _usable(prompts, rows=rows)
        if not usable:
            raise DataError(f"{key}: none of the first {min(rows, len(prompts))} rows can be used; {why[0]}")
        report.sizes[key] = len(prompts)
        size, most = f"{len(prompts):,} rows", config.prompts.eval_size
        if held_out and len(prompts) > most:
            size = f"the first {most:,} of {size} (prompts.eval_size)"
        report.lines.append(f"{key}: {size}; row {usable[0].index}: {usable[0].as_text()[:60]!r}")
        if not (config.rollout.shows_pictures or config.gateway.pictures):
            unshown.look_at_rows(source, key, prompts, usable, report)
        report.notes += _untold(source, key, prompts)
        if why:
            report.notes.append(
                f"{key}: {len(why)} of the first {len(why) + len(usable)} rows cannot be used and will be dropped; "
                f"{why[0]}"
            )
        model = config.model
        if key == "prompts.train" and isinstance(model, TinyModel) and config.rollout.all_environments:
            try:
                report.characters = characters_of(prompts, model.warm_start.steps > 0, config.rollout.given.answers > 0)
            except ValueError as error:  # there is no answer to teach
                report.problems.append(str(error))
        if counts_to is not None:
            for prompt in [*usable, *_of_rare_sources(prompts)]:
                report.rows.setdefault(prompt.source or counts_to, prompt)
        return usable
    return []


def _untold(source: DataConfig, key: str, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Says what rows have for a chat template that nobody tells it."""
    if isinstance(source, MixData) and isinstance(prompts, Mixture):
        for name, part in source.sources.items():
            yield from _untold(part, f"{key}.sources.{name}", prompts.sources[name])
    for column in prompts.untold() if isinstance(prompts, PromptSource) and getattr(source, "chat", False) else ():
        yield (
            f"{key}: rows have a column {column}, and nothing names it, so that no chat template is told of it; where "
            f"it should be, set {key}.{column}_key={column}"
        )


def _of_rare_sources(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first row of each source of a mixture, wherever that is; none of one that cannot be used."""
    first = prompts.one_of_each() if isinstance(prompts, Mixture) else []
    return [prompt for index in first for prompt in _usable(prompts, index, 1)[0]]


def _usable(prompts: Sequence[Prompt], begin: int = 0, rows: int = ROWS) -> tuple[list[Prompt], list[str]]:
    usable, why = [], []
    for index in range(begin, min(begin + rows, len(prompts))):
        try:
            prompt = prompts[index]
            wire.check(prompt.model_dump())
            usable.append(prompt)
        except (DataError, wire.WireError) as error:
            why.append(str(error))
    return usable, why


def check_length(
    config: Config, sizes: list[int], report: Report, model_length: int, key: str = "prompts.train"
) -> None:
    """Whether prompts of so many tokens, which ``key`` gives, leave room for an answer, of one token where none is
    sampled, or as long as there is room. Others than those that are trained on are told of in any case: some may ask
    for less."""
    engine, sampling = config.rollout.engine, config.rollout.sampling
    new = (None if config.rollout.all_given else sampling.max_new_tokens) or 1
    bounded = sampling.max_new_tokens and not config.rollout.all_given
    answer = f"rollout.sampling.max_new_tokens={new}" if bounded else "an answer of a token"
    length = longest_sequence(engine, model_length) or model_length
    long = [size for size in sizes if size + new > length]
    if not long:
        return
    bound = f"rollout.engine{'.options' if isinstance(engine, PluginEngineConfig) else ''}.max_length"
    where = bound if length < model_length else "the model's own length"
    words = (
        f"{len(long)} of the first {len(sizes)} prompts are too long: up to {max(sizes)} tokens, and with "
        f"{answer} {where}={length} has room for {max(0, length - new)}"
    )
    if key == "prompts.train" and len(long) == len(sizes):
        report.problems.append(f"{key}: {words}")
    else:
        report.notes.append(f"{key}: {words}; they will be dropped")
