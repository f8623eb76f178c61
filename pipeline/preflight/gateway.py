"""The gateways: what they need is installed, their ports are free, and the function that finds calls is called once."""

from __future__ import annotations

import importlib.util

from penstock.pipeline.config import Config, PretrainedModel
from penstock.pipeline.preflight import told_tools
from penstock.pipeline.preflight.report import Report
from penstock.protocols.mailbox import AddressError
from penstock.services.gateway import ports
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.install import install
from penstock.services.runtime.plugins import user_code
from penstock.services.turns.tool_calls import TEMPLATE, VLLM, Call, by_text

KEY = "gateway.tool_calls"


def look(config: Config, report: Report) -> None:
    """Adds to ``report`` what is found."""
    gateway = config.gateway
    if not gateway.count:
        return
    with report.collect():
        if missing := [
            name for name in ("fastapi", "jsonschema_rs", "uvicorn") if importlib.util.find_spec(name) is None
        ]:
            raise SetupError(f"gateway.count: {' and '.join(missing)} is missing; run: {install('agents')}")
        _try_parser(gateway.tool_calls)
        try:
            for index in range(gateway.count):
                ports.listen("gateway.http", *ports.http_at(gateway, index)).close()
                ports.listen("gateway.bind", *ports.bind_at(gateway, index)).close()
        except AddressError as error:
            raise SetupError(str(error)) from None
    with report.collect():
        _look_at_template(config, report)


def _look_at_template(config: Config, report: Report) -> None:
    """At what the model's chat template says of tools."""
    if not isinstance(config.model, PretrainedModel) or config.gateway.tool_calls == "none":
        return
    from penstock.services.turns.tokenizer import Tokenizer

    path = config.model.path
    try:
        tokenizer = Tokenizer(path, config.template)
    except SetupError:  # which is told where the model is looked at
        return
    if tokenizer.has_template:
        told_tools.look_at_agents(path, tokenizer, config.gateway.tool_calls, report)


def _try_parser(name: str) -> None:
    """On words that need not hold a call. A library's is looked for when a gateway starts: it needs the tokenizer."""
    if name == TEMPLATE:
        return
    if name.startswith(VLLM):
        if importlib.util.find_spec("vllm") is None:
            raise SetupError(f"{KEY}: {name} needs vLLM where the gateway runs; run: {install('vllm')}")
        return
    find = by_text(name, KEY)
    with user_code(KEY, name):
        found = find("sort ba")
    whole = isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], str) and isinstance(found[1], list)
    if not whole or not all(isinstance(call, Call) for call in found[1]):
        raise SetupError(
            f"{KEY}: {name} returned {type(found).__name__}; it must return the text that is left, and a list of "
            "penstock.services.turns.tool_calls.Call"
        )
