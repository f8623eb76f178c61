"""The environment: loaded in a worker, made, and played on the first row."""

from __future__ import annotations

import queue
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from penstock.pipeline.config import Config, PretrainedModel, TinyModel
from penstock.pipeline.models.characters import SEEN_PROMPTS, UNKNOWN
from penstock.pipeline.preflight import call_parsers, told_tools
from penstock.pipeline.preflight.data import check_length
from penstock.pipeline.preflight.report import Report
from penstock.pipeline.preflight.rewards import ANSWER, TRIAL_S
from penstock.protocols.experience import Prompt
from penstock.services.environments.begun import begun_with
from penstock.services.environments.config import EnvironmentConfig, key_of
from penstock.services.environments.past import Answered
from penstock.services.environments.pool import EnvironmentPool
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.install import install

AGAIN = "once more"
LETTERS = 60
"""Of an answer, or of what is said to it, that are told."""


def look(config: Config, report: Report) -> None:
    """Adds to ``report`` what is found."""
    for source, environment in config.rollout.all_environments.items():
        others = [row for name, row in report.rows.items() if name not in config.rollout.environments]
        row = report.rows.get(source) if source else next(iter(others), report.row)
        _look_at(config, environment, key_of(source), row, report)


def _look_at(config: Config, environment: EnvironmentConfig, key: str, row: Prompt | None, report: Report) -> None:
    """At what stands at ``key``; ``row`` is one that it answers."""
    if environment.tools and environment.tools.mcp and find_spec("mcp") is None:
        report.lacks_package(f"{key}.options.mcp: the SDK of MCP is not installed; run: {install('mcp')}")
        return
    if lacks := environment.tools.lacking() if environment.tools else []:
        report.here += [f"{key}.options.{lack}" for lack in lacks]
        return
    with report.collect():
        if environment.tools:
            call_parsers.try_parser(environment.tools.tool_calls, f"{key}.options.tool_calls")
        try:
            pool = EnvironmentPool(environment, key)
        except ConnectionError as error:  # in a run it is tried again
            raise SetupError(str(error)) from error
        try:
            if row is not None:
                _play(config, environment, key, pool, row, report)
        finally:
            pool.close()


def _play(
    config: Config, environment: EnvironmentConfig, key: str, pool: EnvironmentPool, row: Prompt, report: Report
) -> None:
    """One turn, with answers that need not make sense. Adds to ``report`` what came of it. Raises `SetupError`."""
    truth = row.truth if isinstance(row.truth, str) and row.truth else ANSWER
    words = f"{key}: {environment.environment}"
    heard: dict[str, dict[str, Any]] = {}
    unread = set[str]()
    for name, call in _calls(environment, pool, row, truth).items():
        said: queue.Queue[tuple[dict[str, Any] | None, str]] = queue.Queue()
        call(lambda found, error, said=said: said.put((found, error)))  # type: ignore[misc]
        try:
            found, error = said.get(timeout=min(TRIAL_S, environment.timeout_s) + 2)
        except queue.Empty:
            report.notes.append(f"{words}: {name} did not answer within {TRIAL_S:g} s; it was not looked at")
            break
        if found is None and name == _step(ANSWER) != _step(truth):
            report.notes.append(f"{words}: {name}, tried on row {row.index}, {error}; such an answer has no reward")
            break
        if found is None:
            raise SetupError(f"{words}: {name}, tried on row {row.index}, {error}")
        heard[name] = found
        if name == "reset":
            _look_at_tools(config, environment, key, row, found, report)
            if found["prompt"] is not None:
                report.lines.append(f"{words}: {name}, on row {row.index}, said {_as_read(found['prompt'], report)!r}")
        elif name == "get_reward":
            _check_rewarded(config, environment, key, found["reward"])
        elif "reward" in found and AGAIN not in name:
            then = "ended the task" if found["done"] else f"went on: {_as_read(found['observation'], report)!r}"
            report.lines.append(f"{words}: {name}, on row {row.index}, gave a reward of {found['reward']:g} and {then}")
            if found["reward"] and not config.reward.reads_environment:
                unread.add(
                    f"reward.functions: the rewards of {key} are not read; add {{function: environment}} where they "
                    "are to count"
                )
    report.notes += unread
    _compare(words, heard, row, report)
    _look_at_characters(words, heard, report)


def _step(answer: str) -> str:
    return f"step({answer[:LETTERS]!r})"


def _calls(
    environment: EnvironmentConfig, pool: EnvironmentPool, row: Prompt, truth: str
) -> dict[str, Callable[[Answered], None]]:
    """By name. A second object is told the same as the first, and a third an answer that is hardly right."""
    calls: dict[str, Callable[[Answered], None]] = {
        "reset": lambda heard: pool.reset(0, row, heard),
        _step(truth): lambda heard: pool.step(0, truth, heard),
        f"reset, {AGAIN}": lambda heard: pool.reset(1, row, heard),
    }
    if environment.settles:  # the step may have asked the first already
        return calls | {"get_reward": lambda heard: pool.finish(1, heard)}
    calls[f"{_step(truth)}, {AGAIN}"] = lambda heard: pool.step(1, truth, heard)
    if truth != ANSWER:
        calls[f"reset, {AGAIN}, for another answer"] = lambda heard: pool.reset(2, row, heard)
        calls[_step(ANSWER)] = lambda heard: pool.step(2, ANSWER, heard)
    return calls


def _look_at_tools(
    config: Config, environment: EnvironmentConfig, key: str, row: Prompt, found: dict[str, Any], report: Report
) -> None:
    """What reset has ``found``: can the policy be told of it? Raises `SetupError`."""
    if found["tools"] and not isinstance(found["prompt"], list) and row.messages is None:
        raise SetupError(
            f"{key}: {environment.environment} has tools, which a chat template tells of, and row {row.index} is "
            "plain text; take prompts of messages (prompts.train.chat=true with a source that has it)"
        )
    if found["tools"] and isinstance(config.model, TinyModel):
        raise SetupError(
            f"{key}: {environment.environment} has tools, which a chat template tells of, and a tiny model has "
            "none; take a pretrained model, or an environment without tools"
        )
    if isinstance(config.model, PretrainedModel):
        _encode(config, environment, key, row, found, report)
    if found["tools"]:
        names = ", ".join(str(tool.get("function", {}).get("name")) for tool in found["tools"])
        report.lines.append(f"{key}: {environment.environment}: the policy may call {names}")


def _text(said: Any) -> str:
    """Of what reset or step has said: text, messages, or nothing."""
    return said or "" if not isinstance(said, list) else "\n\n".join(message["content"] for message in said)


def _as_read(said: Any, report: Report) -> str:
    """The beginning of it, as the policy's tokenizer reads it."""
    text, known = _text(said), report.characters
    text = text if len(text) <= LETTERS else f"{text[:LETTERS]} …"
    return text if known is None else "".join(letter if letter in known else UNKNOWN for letter in text)


def _compare(words: str, heard: dict[str, dict[str, Any]], row: Prompt, report: Report) -> None:
    """Adds to ``report`` where two objects that were told the same have said different things."""
    for name, found in heard.items():
        again = heard.get(f"{name}, {AGAIN}", found)
        for what in ("prompt", "observation", "reward", "done"):
            if found.get(what) != again.get(what):
                both = " and ".join(repr(_short(each[what])) for each in (found, again))
                report.notes.append(
                    f"{words}: {name}, on row {row.index}, gave the {what} {both} when it was tried twice: the answers "
                    "of a group are compared with each other, so what is random in a task should follow from its "
                    "prompt, e.g. random.Random(prompt.index)"
                )
                return


def _short(said: Any) -> Any:
    return _text(said)[:LETTERS] if isinstance(said, list | str) else said


def _look_at_characters(words: str, heard: dict[str, dict[str, Any]], report: Report) -> None:
    """Adds to ``report`` what a tiny model cannot read of what was said."""
    if report.characters is None:
        return
    text = "".join(_text(found.get("prompt")) + _text(found.get("observation")) for found in heard.values())
    if unknown := dict.fromkeys(letter for letter in text if letter not in report.characters):
        report.notes.append(
            f"{words}: says characters that the tiny model does not know, and reads as {UNKNOWN}: "
            f"{', '.join(map(repr, unknown))}; it knows a-z, 0-9, some marks, and what the first {SEEN_PROMPTS:,} rows "
            "of prompts.train have: say it in these, or take a pretrained model"
        )


def _check_rewarded(config: Config, environment: EnvironmentConfig, key: str, reward: float | None) -> None:
    """Raises `SetupError` where the objects of a class give none, and nobody else judges the answers."""
    if reward is None and environment.tools and config.unjudged:
        raise SetupError(
            f"{key}.options.class: {environment.tools.class_} has no get_reward(), so that it gives no reward, and "
            "nobody else is named to judge the answer; write one, or give a function, e.g. "
            "reward.functions=[{function: exact_match}]"
        )


def _encode(
    config: Config, environment: EnvironmentConfig, key: str, row: Prompt, found: dict[str, Any], report: Report
) -> None:
    """What reset has ``found`` for the ``row``, as tokens: there is room for an answer, and the policy hears of the
    tools. Raises `SetupError`."""
    from penstock.services.modeling.lengths import positions_of
    from penstock.services.modeling.load import load_config
    from penstock.services.turns.tokenizer import Tokenizer

    assert isinstance(config.model, PretrainedModel)
    path = config.model.path
    tokenizer = Tokenizer(path, config.template)
    try:
        prompt, tools = begun_with(row, found), found.get("tools")
        tokens = tokenizer.encode(prompt, tools)
        silent = bool(tools) and np.array_equal(tokens, tokenizer.encode(prompt))
    except Exception as error:  # a template may raise anything
        what = f"{type(error).__name__}: {error}"
        raise SetupError(f"{key}: {environment.environment}: what row {row.index} begins with: {what}") from error
    if silent:
        words = (
            f"{key}: {environment.environment} has tools, and the chat template of {path} does not tell of them; take "
            "a model whose template does, or give model.chat_template"
        )
        if not any(message["role"] == "system" for message in prompt.as_messages()):
            raise SetupError(words)
        report.notes.append(f"{words}; unless the system message of each prompt tells of them")
    form = environment.tools.tool_calls if environment.tools else ""
    call_parsers.check_fits(form, tokenizer, f"{key}.options.tool_calls")
    if why := told_tools.other_form(form, str(tokenizer.plain.chat_template)):
        report.notes.append(f"{key}.options.tool_calls={form}: the chat template of {path} {why}")
    if tools and prompt.messages is not None:
        _tell_result(environment, key, tokenizer.telling(prompt.chat_template_kwargs), tools, report)
    check_length(config, [len(tokens)], report, positions_of(load_config(path)) or 1 << 30, key)


def _tell_result(
    environment: EnvironmentConfig, key: str, tokenizer: Any, tools: list[dict[str, Any]], report: Report
) -> None:
    """The chat template is told what a tool has given. Adds to ``report`` where it refuses, or says nothing of it.
    Raises `SetupError` where all that the policy calls would be lost."""
    why = "leaves out what they give (a message of the role tool)"
    try:
        if told_tools.tells_results(tokenizer, tools):
            return
    except Exception as error:  # a template may raise anything
        why = f"refuses what they give (a message of the role tool): {type(error).__name__}: {error}"
    words = (
        f"{key}: {environment.environment} has tools, and the chat template {why}; give model.chat_template, or take "
        "another model"
    )
    if environment.tools:
        raise SetupError(words)
    report.notes.append(f"{words}; unless step tells of it in other messages")
