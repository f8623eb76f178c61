"""The environment: loaded in a worker, made, and played on the first row."""

from __future__ import annotations

import queue
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from penstock.pipeline.config import Config, PretrainedModel, TinyModel
from penstock.pipeline.preflight.data import check_length
from penstock.pipeline.preflight.report import Report
from penstock.pipeline.preflight.rewards import ANSWER, TRIAL_S
from penstock.protocols.experience import Prompt
from penstock.services.environments.begun import begun_with
from penstock.services.environments.config import EnvironmentConfig, key_of
from penstock.services.environments.past import Answered
from penstock.services.environments.pool import EnvironmentPool
from penstock.services.environments.tool_calls import BEGIN, as_called
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.install import install

AGAIN = "reset, once more"


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
    """One turn, with an answer that need not make sense. Adds to ``report`` what came of it. Raises `SetupError`."""
    truth = row.truth if isinstance(row.truth, str) and row.truth else ANSWER
    calls: dict[str, Callable[[Answered], None]] = {
        "reset": lambda heard: pool.reset(0, row, heard),
        f"step({truth[:60]!r})": lambda heard: pool.step(0, truth, heard),
    }
    if environment.settles:
        calls[AGAIN] = lambda heard: pool.reset(1, row, heard)  # the step may have asked the first already
        calls["get_reward"] = lambda heard: pool.finish(1, heard)
    for name, call in calls.items():
        said: queue.Queue[tuple[dict[str, Any] | None, str]] = queue.Queue()
        call(lambda found, error, said=said: said.put((found, error)))  # type: ignore[misc]
        try:
            found, error = said.get(timeout=min(TRIAL_S, environment.timeout_s) + 2)
        except queue.Empty:
            report.notes.append(
                f"{key}: {environment.environment}: {name} did not answer within {TRIAL_S:g} s; it was not looked at"
            )
            return
        if found is None:
            raise SetupError(f"{key}: {environment.environment}: {name}, tried on row {row.index}, {error}")
        if name == AGAIN:
            continue
        if found.get("tools") and not isinstance(found["prompt"], list) and row.messages is None:
            raise SetupError(
                f"{key}: {environment.environment} has tools, which a chat template tells of, and row {row.index} is "
                "plain text; take prompts of messages (prompts.train.chat=true with a source that has it)"
            )
        if found.get("tools") and isinstance(config.model, TinyModel):
            raise SetupError(
                f"{key}: {environment.environment} has tools, which a chat template tells of, and a tiny model has "
                "none; take a pretrained model, or an environment without tools"
            )
        if "prompt" in found and isinstance(config.model, PretrainedModel):
            _encode(config, environment, key, row, found, report)
        if found.get("tools"):
            names = ", ".join(str(tool.get("function", {}).get("name")) for tool in found["tools"])
            report.lines.append(f"{key}: {environment.environment}: the policy may call {names}")
        if name == "get_reward":
            _check_rewarded(config, environment, key, found["reward"])
        elif "reward" in found:
            then = "ended the task" if found["done"] else "went on"
            report.lines.append(
                f"{key}: {environment.environment}: {name}, on row {row.index}, gave a reward of {found['reward']:g} "
                f"and {then}"
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
    if form in BEGIN and BEGIN[form] not in str(tokenizer.plain.chat_template):
        report.notes.append(
            f"{key}.options.tool_calls={form}: the chat template of {path} does not say {BEGIN[form]}, so the policy "
            "may call tools in another form; see docs/environments.md"
        )
    if tools and prompt.messages is not None:
        _tell_result(environment, key, tokenizer, report)
    check_length(config, [len(tokens)], report, positions_of(load_config(path)) or 1 << 30, key)


def _tell_result(environment: EnvironmentConfig, key: str, tokenizer: Any, report: Report) -> None:
    """The chat template is told what a tool has given. Adds to ``report`` where it refuses. Raises `SetupError` where
    all that the policy calls would."""
    asked, told = as_called("", "hermes", [{"role": "tool", "content": "7"}], 1)
    try:
        tokenizer.observe(told, True, next(iter(tokenizer.stop_ids), 0), asked)
    except Exception as error:  # a template may raise anything
        words = (
            f"{key}: {environment.environment} has tools, and the chat template refuses what they give (a message of "
            f"the role tool): {type(error).__name__}: {error}; give model.chat_template, or take another model"
        )
        if environment.tools:
            raise SetupError(words) from error
        report.notes.append(f"{words}; unless step tells of it in other messages")
