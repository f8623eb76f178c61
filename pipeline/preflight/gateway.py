"""The gateways: what they need is installed, their ports are free, and the function that finds calls is called once."""

from __future__ import annotations

import importlib.util

from penstock.pipeline.config import Config, PretrainedModel
from penstock.pipeline.preflight import call_parsers, told_tools
from penstock.pipeline.preflight.report import Report
from penstock.protocols.mailbox import AddressError
from penstock.services.gateway import ports
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.install import install

KEY = "gateway.tool_calls"


def look(config: Config, report: Report) -> None:
    """Adds to ``report`` what is found."""
    gateway = config.gateway
    if not gateway.count:
        return
    if not config.reward.reads_environment:
        report.notes.append(
            "reward.functions: what agents say that their sessions were worth (finish(reward=…)) is not read; add "
            "{function: environment} where it is to count"
        )
    with report.collect():
        if missing := [
            name for name in ("fastapi", "jsonschema_rs", "uvicorn") if importlib.util.find_spec(name) is None
        ]:
            raise SetupError(f"gateway.count: {' and '.join(missing)} is missing; run: {install('agents')}")
        call_parsers.try_parser(gateway.tool_calls, KEY)
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
    call_parsers.check_fits(config.gateway.tool_calls, tokenizer, KEY)
    if tokenizer.has_template:
        told_tools.look_at_agents(path, tokenizer, config.gateway.tool_calls, report)
