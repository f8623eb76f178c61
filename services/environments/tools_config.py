"""The options of the environment ``tools``."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator

from penstock.services.environments.tool_results import Cut
from penstock.services.runtime.nearest import nearest
from penstock.services.runtime.settings import Section
from penstock.services.runtime.user_folders import lacks_command
from penstock.services.turns.tool_calls import FORMS, Form, named_parser

READY = {"python": "penstock.services.environments.python_tool:python_tool"}
"""Tools that are there by name: what makes each, from the options of its own."""
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_SECRET = re.compile(r"auth|cookie|key|token|secret|password", re.IGNORECASE)
"""What headers are called whose values nobody is to read."""


class PythonConfig(Section):
    """Limits of the tool ``python``."""

    seconds: float = Field(5.0, gt=0)
    """Of CPU and of time, for a call, e.g. ``10``."""
    memory_mb: int = Field(1024, ge=64)
    """MiB that each of a program's processes may have, e.g. ``512``."""
    network: bool = False
    """Programs reach the network."""
    at_once: int | None = Field(None, ge=1)
    """Programs that run at once in a rollout, e.g. ``8``; others wait. null: as many as the machine has cores."""


class McpServerConfig(Section):
    """A server of the Model Context Protocol, whose tools the policy may call."""

    command: str | None = None
    """Starts a server that is spoken to over its stdin and stdout, e.g. ``uvx mcp-server-fetch``. Here, in ``url`` and
    in ``headers``, ``${NAME}`` is replaced by that environment variable."""
    url: str | None = None
    """A server that is there already, over streamable HTTP, e.g. ``http://search:8000/mcp``."""
    headers: dict[str, str] = {}
    """Sent to ``url``, e.g. ``{Authorization: "Bearer ${SEARCH_TOKEN}"}``."""
    env: list[str] = []
    """Names of environment variables that the command is given, e.g. ``[GITHUB_TOKEN]``, beside HOME, PATH and the
    like."""
    tools: list[str] | None = Field(None, min_length=1)
    """Which of its tools, e.g. ``[fetch]``. null: all."""
    prefix: str = Field("", pattern=r"^[A-Za-z0-9_.-]*$")
    """Stands before the names of its tools, e.g. ``web_``."""
    per: Literal["worker", "trajectory"] = "worker"
    """One server or session for all trajectories of a rollout, or, with ``trajectory``, one for each that calls it:
    right where it remembers what was done."""
    start_s: float = Field(60.0, gt=0, le=100)
    """Seconds. It must be ready, and have listed its tools, after so many. With ``per: trajectory`` the first call of a
    trajectory waits so long for it: set it below the environment's ``timeout_s``, e.g. ``10``."""
    timeout_s: float = Field(20.0, gt=0)
    """Seconds. What the policy reads of a call that takes longer is that it did."""

    @field_validator("command")
    @classmethod
    def _is_a_command(cls, value: str | None) -> str | None:
        try:
            words = shlex.split(value) if value is not None else [""]
        except ValueError as error:
            raise ValueError(f"it is no command: {error}") from None
        if not words:
            raise ValueError("an empty command starts nothing; give one, e.g. uvx mcp-server-fetch")
        return value

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, value: str | None) -> str | None:
        try:
            parts = urlsplit(value or "http://host")
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("it is no URL; give one, e.g. http://127.0.0.1:8000/mcp")  # it may have a secret
        secrets = (name for name, text in parse_qsl(parts.query) if _SECRET.search(name) and not _VARIABLE.search(text))
        if parts.username is not None or any(secrets):
            raise ValueError(
                "it has a secret, which is in the environment alone, since the run's folder shows this config; write "
                f"${{MY_TOKEN}} in its place, or headers: {_IN_ENVIRONMENT}"
            )
        return value

    @field_validator("headers")
    @classmethod
    def _hold_no_secrets(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if _SECRET.search(name) and not _VARIABLE.search(text):
                raise ValueError(
                    f"{name}: a secret is in the environment alone, since the run's folder shows this config; write "
                    f"e.g. {_IN_ENVIRONMENT}"
                )
        return value

    @field_validator("env")
    @classmethod
    def _are_names(cls, value: list[str]) -> list[str]:
        for name in value:
            if not re.fullmatch(r"\w+", name):
                known = re.split(r"\W", name)[0]
                raise ValueError(
                    f"{known!r}: give the variable's name alone, e.g. [GITHUB_TOKEN]; its value is in the "
                    "environment of penstock"
                )
        return value

    @model_validator(mode="after")
    def _one_way(self) -> McpServerConfig:
        if (self.command is None) == (self.url is None):
            raise ValueError("give command, which starts a server, or url, of one that is there: one of the two")
        if self.command is None and self.env:
            raise ValueError("env is for a command; a url has headers")
        if self.url is None and self.headers:
            raise ValueError("headers are for a url; a command has env")
        return self

    @property
    def name(self) -> str:
        """What it is called in errors and logs: as it stands in the config, without secrets."""
        return self.command or self.url or ""

    def variables(self) -> list[str]:
        """The environment variables that it needs."""
        written = [self.name, *self.headers.values()]
        return [*self.env, *(name for text in written for name in _VARIABLE.findall(text))]

    def lacking(self) -> list[str]:
        """What this machine has not of what it needs."""
        unset = [name for name in dict.fromkeys(self.variables()) if name not in os.environ]
        lacks = [f"{name} is not set in the environment; export it" for name in unset]
        program = shlex.split(self.command)[0] if self.command else ""
        if program and not _VARIABLE.search(program) and (why := lacks_command(program)):
            lacks.append(why)
        return lacks


_IN_ENVIRONMENT = '{Authorization: "Bearer ${MY_TOKEN}"}, and export MY_TOKEN'


class ToolsConfig(Section):
    """What the environment ``tools`` is made with."""

    functions: list[str] = []
    """Functions of yours, ``module:function``, and ready tools by name, e.g. ``["my_tools:search", python]``."""
    class_: str | None = Field(None, alias="class")
    """A class of yours, ``module:Class``, whose methods the policy may call, e.g. ``my_env:Counter``: an object for
    each trajectory."""
    class_options: dict[str, Any] = {}
    """What an object is made with, e.g. ``{limit: 3}``."""
    mcp: list[McpServerConfig] = []
    """Servers whose tools the policy may call, e.g. ``[{command: "uvx mcp-server-fetch"}]``."""
    python: PythonConfig = PythonConfig()
    """Limits of the tool ``python``, e.g. ``{seconds: 10}``."""
    tool_calls: str = "hermes"
    """How the policy calls them, as its chat template has taught it, e.g. ``json``. ``hermes``: JSON between
    ``<tool_call>`` and ``</tool_call>``, as Qwen 2.5 and 3; ``xml``: ``<function=NAME>`` there, as Qwen3-Coder;
    ``json``: the whole answer is one call or a list of some, as Llama 3 and Mistral; ``harmony``, in channels, as
    gpt-oss; ``template``, ``vllm:NAME`` and ``module:function`` as of `gateway.tool_calls`."""
    calls: int = Field(16, ge=1)
    """Calls in a turn, e.g. ``4``; of what is above, the policy reads that."""
    longest: int = Field(8_000, ge=1)
    """Characters of a result that the policy reads, e.g. ``2000``; what is longer is cut."""
    cut: Cut = "end"
    """Where it is cut, e.g. ``middle``: at its ``end``; or in the ``middle``, or at its ``start``, where the policy
    reads that something is left out. Of what the tool ``python`` prints there is a MiB at most."""

    @field_validator("functions")
    @classmethod
    def _known(cls, value: list[str]) -> list[str]:
        for name in value:
            if name not in READY and ":" not in name:
                raise ValueError(f"{name!r} is neither module:function nor one of {', '.join(sorted(READY))}")
        return value

    @field_validator("tool_calls")
    @classmethod
    def _is_a_parser(cls, value: str) -> str:
        if value == "none":
            raise ValueError("'none' calls nothing; name the form in which the policy calls its tools, e.g. hermes")
        return named_parser(value)

    @field_validator("class_")
    @classmethod
    def _a_class(cls, value: str | None) -> str | None:
        if value is not None and value.count(":") != 1:
            raise ValueError(f"{value!r} is not module:Class, e.g. my_env:Counter")
        return value

    @model_validator(mode="after")
    def _something(self) -> ToolsConfig:
        if not self.functions and not self.mcp and not self.class_:
            raise ValueError("no tools are given; set functions, class or mcp, e.g. functions: [python]")
        if self.class_options and not self.class_:
            raise ValueError("class_options: there is no class; set class, or take them out")
        if "python" in self.model_fields_set and "python" not in self.functions:
            raise ValueError("python: these are limits of a tool that is not given; add python to functions")
        return self

    @property
    def form(self) -> Form:
        """In which the environment reads calls where nobody has told it of a tokenizer: others are read before, and
        written as Hermes."""
        return next((form for form in FORMS if form == self.tool_calls), "hermes")

    @property
    def most_read(self) -> int | None:
        """Characters of a ready tool's result that are wanted, from its begin on; None: all."""
        return self.longest if self.cut == "end" else None

    def options_of(self, name: str) -> Any:
        """Of a ready tool."""
        return getattr(self, name)

    def check_deadlines(self, timeout_s: float) -> None:
        """``timeout_s``: of the environment. Raises `ValueError` where a call may outlast the step that it is of."""
        limits = {}
        for index, server in enumerate(self.mcp):
            if server.per == "trajectory":  # its first call starts it
                limits[f"mcp.{index}.start_s + timeout_s"] = server.start_s + server.timeout_s
            else:
                limits[f"mcp.{index}.timeout_s"] = server.timeout_s
        if "python" in self.functions:
            limits["python.seconds"] = self.python.seconds
        for key, seconds in limits.items():
            if seconds >= timeout_s:
                raise ValueError(
                    f"options.{key}={seconds:g} is not below timeout_s={timeout_s:g}, after which the whole step has "
                    "failed; lower it, or raise timeout_s"
                )

    def lacking(self) -> list[str]:
        """What this machine has not of what the servers need, each with its key."""
        return [f"mcp.{index}: {lack}" for index, server in enumerate(self.mcp) for lack in server.lacking()]


def with_variables(text: str, told: Callable[[str, str], object]) -> str:
    """``text`` with each ``${NAME}`` replaced by that environment variable; ``told`` of each name and value. Raises
    `KeyError` where one is not set."""

    def value(found: re.Match[str]) -> str:
        told(found[1], os.environ[found[1]])
        return os.environ[found[1]]

    return _VARIABLE.sub(value, text)


def read_options(options: dict[str, Any]) -> ToolsConfig:
    """Raises `ValueError` with what is wrong, each by its key below ``options``."""
    try:
        return ToolsConfig.model_validate(options)
    except ValidationError as error:
        raise ValueError("; ".join(_explained(each) for each in error.errors()[:3])) from None


def _explained(error: Any) -> str:
    *above, last = error["loc"] or ("",)
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        sections: dict[Any, type[Section]] = {"mcp": McpServerConfig, "python": PythonConfig}
        known = sections.get(next(iter(above), None), ToolsConfig).model_fields
        message = f"unknown key; {nearest(str(last), [name.rstrip('_') for name in known])}"
    elif error["type"] == "list_type" and last == "env":
        message = (
            "it is no list; give the names alone, e.g. [GITHUB_TOKEN]; their values are in the environment of penstock"
        )
    elif error["type"] != "value_error" and error["loc"][:1] != ("mcp",):  # what is there may be a secret
        message += f", got {error['input']!r}"
    at = ".".join(map(str, error["loc"]))
    return f"{at}: {message}" if at else message
