"""Tools, calls of them and what these give: whether the chat template tells of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.pipeline.preflight.report import Report
from penstock.protocols.experience import Prompt
from penstock.services.environments.tool_calls import BEGIN, as_called
from penstock.services.turns.channels import CHANNEL
from penstock.services.turns.tool_calls import FORMS, HARMONY

if TYPE_CHECKING:
    from penstock.services.turns.tokenizer import Tokenizer


KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MEANT = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


def look_at_tiny(rows: Sequence[Prompt], report: Report) -> None:
    """Adds to ``report`` where the first ``rows`` have any, of a tiny model, which has no chat template."""
    if found := next((prompt for prompt in rows if prompt.tools or _calls(prompt)), None):
        report.problems.append(
            f"prompts.train: row {found.index} has tools, or calls of them, which a chat template tells of, and a tiny "
            "model has none; take a pretrained model, or leave tools_key out and write calls into the contents"
        )
    if found := next((prompt for prompt in rows if prompt.chat_template_kwargs), None):
        report.problems.append(
            f"prompts.train: row {found.index} has chat_template_kwargs, which a chat template is told, and a tiny "
            "model has none; take a pretrained model, or leave them out"
        )


def look_at_rows(path: str, tokenizer: Tokenizer, rows: Sequence[Prompt], report: Report) -> None:
    """Adds to ``report`` where the chat template of the model at ``path`` leaves out what the first ``rows`` have."""
    for prompt in rows:
        if role := next(_unheard(tokenizer, prompt), ""):
            report.problems.append(
                f"prompts.train: row {prompt.index}: the chat template of {path} does not tell of messages whose role "
                f"is {role!r}; write {_MEANT.get(role, 'system, user or assistant')}, or give model.chat_template"
            )
            return
        silent = bool(prompt.tools) and np.array_equal(
            tokenizer.encode(prompt), tokenizer.encode(prompt.model_copy(update={"tools": None}))
        )
        text = tokenizer.telling(prompt.chat_template_kwargs)
        lost = next((name for message in _calls(prompt) if (name := text.lost_call(message, prompt.tools))), "")
        if silent or lost:
            what = "its tools" if silent else f"the call of {lost} in its conversation"
            report.problems.append(
                f"prompts.train: row {prompt.index}: the chat template of {path} does not tell of {what}; take a model "
                "whose template does, give model.chat_template, or leave tools_key out and write them into the contents"
            )
            return


def _unheard(tokenizer: Tokenizer, prompt: Prompt) -> Iterator[str]:
    """Roles that chat templates do not know by that name, of messages that this one leaves out."""
    messages = list(prompt.messages or ())
    for place, message in enumerate(messages):
        if message["role"] in KNOWN_ROLES or not isinstance(message.get("content"), str):
            continue
        other = [*messages[:place], {**message, "content": message["content"] + " ?"}, *messages[place + 1 :]]
        if np.array_equal(tokenizer.encode(prompt), tokenizer.encode(prompt.model_copy(update={"messages": other}))):
            yield message["role"]


def other_form(form: str, template: str) -> str:
    """Why the policy, whose chat template this is, may call tools otherwise than in the ``form`` in which calls are
    looked for, and what to do; empty: nothing speaks for that."""
    if form in ("hermes", "xml") and "<arg_key>" in template:
        return (
            "tells of <arg_key> in <tool_call>, as GLM's, which none of hermes, xml and json reads: set it to "
            "vllm:glm45, where vLLM is installed, or to a function of yours, or give model.chat_template"
        )
    if form in FORMS and CHANNEL in template:
        return f"tells of {CHANNEL}, as gpt-oss', where calls are in channels: set it to {HARMONY}"
    if form == "hermes" and BEGIN["xml"] in template:
        return f"tells of {BEGIN['xml']}NAME> in <tool_call>, and not of JSON there: set it to xml"
    if form in BEGIN and BEGIN[form] not in template:
        return f"does not say {BEGIN[form]}, so the policy may call tools in another form; see docs/environments.md"
    return ""


def tells_results(tokenizer: Tokenizer, tools: list[dict[str, Any]]) -> bool:
    """What a tool of ``tools`` gives can be read in what the chat template tells of it. Raises what a template may."""
    found = []
    for given in ("7", "7 7 7 7"):  # letters that a tokenizer does not know are at least as many
        asked, told = as_called("", "hermes", [{"role": "tool", "content": given}], 1)
        found.append(tokenizer.observe(told, True, next(iter(tokenizer.stop_ids), 0), asked, (), tools))
    return not np.array_equal(found[0], found[1])


def look_at_agents(path: str, tokenizer: Tokenizer, form: str, report: Report) -> None:
    """Adds to ``report`` where agents that give the policy tools would be heard in vain, or the calls of these, of this
    ``form``, be overheard: whether they have tools is theirs."""
    asked: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
    tool = {"name": "look", "description": "looks", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": tool}]
    try:
        if np.array_equal(tokenizer.encode_chat(asked), tokenizer.encode_chat(asked, tools)):
            lost = "does not tell of tools"
        elif not tells_results(tokenizer, tools):
            lost = "leaves out what tools give (messages of the role tool)"
        else:
            lost = ""
    except Exception as error:  # a template may raise anything
        lost = f"refuses tools, or what they give: {type(error).__name__}: {error}"
    if not lost:
        if why := other_form(form, str(tokenizer.plain.chat_template)):
            report.notes.append(
                f"gateway.tool_calls={form}: where agents have tools, the chat template of {path} {why}"
            )
        return
    report.notes.append(
        f"gateway: the chat template of {path} {lost}, so the policy does not learn of it where agents have tools; "
        "take a model whose template does, or give model.chat_template"
    )


def _calls(prompt: Prompt) -> list[dict[str, object]]:
    return [message for message in prompt.messages or () if message.get("tool_calls")]
