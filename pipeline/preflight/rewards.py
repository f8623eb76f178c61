"""The reward functions: each loaded in a worker of its own, and called on a real row."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.pipeline.config import Config
from penstock.pipeline.preflight.report import Report
from penstock.pipeline.preflight.reward_notes import TRUTH, left_out, never_reached
from penstock.pipeline.preflight.servers import nobody_at
from penstock.protocols.columns import ColumnTable
from penstock.protocols.experience import Prompt
from penstock.services.data.picture_files import blank_picture
from penstock.services.reward.config import ASKING, ENVIRONMENT, FunctionConfig
from penstock.services.reward.function import of_prompt
from penstock.services.reward.groups import apart, together
from penstock.services.reward.other_forms import more_of_prompt
from penstock.services.reward.truth import as_text
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.registry import actors
from penstock.services.user_processes.pool import WorkerPool
from penstock.services.user_processes.worker import Call

TRIAL_S = 4.0
"""A call that takes longer is not waited for."""
MOST_SOURCES = 16
"""Rows of so many are tried."""
ANSWER = "I think the answer is 42."


@dataclass
class Trial:
    """What came of a function's, which stands at ``key``: what it gave for the first row, what one should know of any,
    and all that it gave (`Given`)."""

    function: FunctionConfig
    key: str
    line: str = ""
    notes: list[str] = field(default_factory=list)
    gave: dict[tuple[str, str], list[float]] = field(default_factory=dict)


def look(config: Config, report: Report) -> None:
    """Adds to ``report`` what is found; nothing where nobody would ask them."""
    if not actors(config)["reward"].count(config):
        return
    functions = [(i, f) for i, f in enumerate(config.reward.functions) if f.function != ENVIRONMENT]
    lacking = {index: why for index, f in functions if (why := _unasked(f, f"reward.functions.{index}"))}
    report.here += lacking.values()
    functions = [(index, function) for index, function in functions if index not in lacking]
    if not functions:
        return
    trials = [Trial(function, f"reward.functions.{index}") for index, function in functions]
    with ThreadPoolExecutor(len(functions)) as threads:
        tried = [
            threads.submit(_try, trial, config, list(_rows_for(trial.function, config, report))) for trial in trials
        ]
    for trial, ended in zip(trials, tried, strict=True):
        with report.collect():
            ended.result()
        report.lines += [trial.line] * bool(trial.line)
        report.notes += filter(None, (never_reached(trial.function, trial.key, config), *trial.notes))
    report.notes += dict.fromkeys(left_out(config, [(trial.function, trial.gave) for trial in trials]))


def _unasked(function: FunctionConfig, key: str) -> str:
    """Why the ``function`` at ``key`` has no server to ask; empty: it has, or asks none, or is not to be tried."""
    url = str(function.options.get("url", ""))
    if function.function not in ASKING or not function.trial or not url:
        return ""
    why = nobody_at(url, f"{key}.options.url")
    return f"{why}, or set {key}.trial=false" if why else ""


def _rows_for(function: FunctionConfig, config: Config, report: Report) -> Iterator[Prompt]:
    """A row of each source that it would be asked for, of so many, as it would be told of it."""
    asked = [source for source in function.sources or report.rows if source in report.rows]
    for source in asked[:MOST_SOURCES]:
        yield _shown_by_others(config, report.rows[source].model_copy(update={"source": source}))


def _shown_by_others(config: Config, row: Prompt) -> Prompt:
    """``row`` with a blank picture, where an environment or agents show some, and it has none of its own."""
    if row.pictures or not (config.rollout.shows_pictures or config.gateway.pictures):
        return row
    try:
        return row.model_copy(update={"pictures": (blank_picture(),)})
    except ImportError:
        return row


def _try(trial: Trial, config: Config, rows: list[Prompt]) -> None:
    """Fills ``trial``, of ``rows``. Raises `SetupError` where the function cannot be called, or fails on every answer
    to one of them."""
    key, function = trial.key, trial.function
    program = replace(function.program(key), per_minute=None)
    pool = WorkerPool(program, workers=1, limit=8)  # importing it may take as long as in the run
    try:
        for row, whole in _with_its_truth(key, function, rows if function.trial else []):
            answers, calls = _called(pool, function, config.columns, row, whole)
            trial.line = trial.line or _given(key, function, row, answers, calls)
            for answer, call in zip(answers, calls, strict=True):
                if call.done() and not call.exception():
                    trial.gave[row.source, TRUTH if answer != ANSWER else ANSWER] = call.result()
            if note := _judge(key, function, row, answers, calls):
                trial.notes.append(note)
                break
    finally:
        pool.close()


def _with_its_truth(key: str, function: FunctionConfig, rows: list[Prompt]) -> Iterator[tuple[Prompt, Prompt]]:
    """``rows`` with what the function is given of their truth, each with what it was before. Raises `SetupError` where
    its `truth_key` is in none."""
    for row in rows:
        truth = function.truth_of(row.truth)
        if truth is None and function.truth_key:
            has = f"it has {', '.join(map(str, row.truth))}" if isinstance(row.truth, dict) else "it is no map"
            remedy = "" if isinstance(row.truth, dict) else "; set prompts.train.truth_key=null for the whole row"
            raise SetupError(
                f"{key}.truth_key: {function.truth_key!r} is not in the truth of row {row.index}; {has}{remedy}"
            )
        yield row.model_copy(update={"truth": truth}), row


def _called(
    pool: WorkerPool, function: FunctionConfig, table: ColumnTable, row: Prompt, whole: Prompt
) -> tuple[list[str], list[Future[list[float]]]]:
    """The answers to ``row``, which is the ``whole`` one with its part of the truth, that it was tried on, and a call
    for each."""
    known = isinstance(row.truth, str | int | float) and not isinstance(row.truth, bool)
    answers = [answer for answer in (as_text(row.truth) if known else None, ANSWER) if answer]
    offered = [_offered(function, table, row, answer) | more_of_prompt(whole) for answer in answers]
    if function.whole_group and len(offered) == 1:
        offered *= 2  # or it would not be seen that it gives one number for all
    calls = [pool.submit(Call(each)) for each in ([together(offered)] if function.whole_group else offered)]
    done = wait(calls, TRIAL_S).done
    if function.whole_group and done:
        calls = apart(calls[0], len(offered))[: len(answers)]
    return (answers if len(calls) == len(answers) else answers[:1]), calls


def _given(
    key: str, function: FunctionConfig, row: Prompt, answers: list[str], calls: list[Future[list[float]]]
) -> str:
    """What the function gave for each answer that it was tried on; empty where it gave nothing."""
    given = [
        f"{_told(function, call.result())} for {TRUTH if answer != ANSWER else repr(answer)}"
        for answer, call in zip(answers, calls, strict=True)
        if call.done() and not call.exception()
    ]
    return f"{key}: {function.function}, called on row {row.index}, gave {', '.join(given)}" * bool(given)


def _told(function: FunctionConfig, numbers: list[float]) -> str:
    first, *more = (f"{number:g}" for number in numbers)
    return first + (f" ({', '.join(map(' '.join, zip(function.also, more, strict=True)))})" if more else "")


def _judge(
    key: str, function: FunctionConfig, row: Prompt, answers: list[str], calls: list[Future[list[float]]]
) -> str:
    failed = [(a, call.exception()) for a, call in zip(answers, calls, strict=True) if call.done() and call.exception()]
    if not failed:
        late = sum(not call.done() for call in calls)
        return f"{key}: {function.function} did not answer within {TRIAL_S:g} s; its result was not looked at" * bool(
            late
        )
    answer, error = failed[0]
    of_source = f" of {row.source!r}" * bool(row.source)
    words = f"{key}: {function.function}, called on row {row.index}{of_source} with the answer {answer[:60]!r}, {error}"
    if len(failed) == len(calls):
        numbers = "these, each finite" if function.also else "a finite number"
        remedy = f"raise {key}.timeout_s" if "timed out" in str(error) else f"it is to return {numbers}"
        raise SetupError(f"{words}; {remedy}, or set {key}.trial=false, which does not try it")
    return f"{words}; such an answer has no reward"


def _offered(function: FunctionConfig, table: ColumnTable, row: Prompt, answer: str) -> dict[str, Any]:
    token = table.by_token
    read = {name.replace("/", "_"): np.zeros(4, np.float32) if name in token else 0.0 for name in function.columns}
    offered = {
        "response": answer,
        "response_tokens": len(answer),
        "turns": [answer],
        "pictures": list(row.pictures),
        "finish_reason": "stop",
        "group": 0,
        "sample": 0,
        "step": 0,
    }
    return of_prompt(row) | offered | read
