"""Config section of the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from penstock.services.environments.tools_config import ToolsConfig, read_options
from penstock.services.runtime.settings import Section
from penstock.services.user_processes.worker import Program

KEY = "rollout.environment"
TOOLS = "tools"
REGISTRY = {TOOLS: "penstock.services.environments.tools:Tools"}
"""Environments by name."""
HANDLER = "penstock.services.environments.sessions:Sessions"
TOOLS_HANDLER = "penstock.services.environments.tools:ToolSessions"


def key_of(source: str) -> str:
    """Where the config names the environment of this source; "": that of all for which it names no other."""
    return f"rollout.environments.{source}" if source else KEY


class EnvironmentConfig(Section):
    """A task of several turns: a Python class that answers the policy."""

    environment: str
    """A name (``tools``), or ``module:Class`` of your own, e.g. ``my_env:Guess``: one object for each trajectory, with
    ``step(answer)``, and ``reset(prompt)`` where it wants to see the prompt."""
    options: dict[str, Any] = {}
    """What an object is made with, e.g. ``{digits: 2}``. Those of ``tools`` are in docs/environments.md."""
    max_turns: int = Field(8, ge=1)
    """Turns that the policy has at most, e.g. ``4``; each may be `rollout.sampling.max_new_tokens` long."""
    timeout_s: float = Field(30.0, gt=0)
    """Seconds. A call of reset or step that takes longer ends its trajectory without a reward."""
    pictures: bool = False
    """It shows pictures of its own (``penstock.Turn(pictures=…)``; the results of its tools), e.g. ``true``: engines
    must know before the first comes."""
    workers: int | None = Field(None, ge=1)
    """Processes that a plain class runs in, for each rollout, e.g. ``8`` where step computes. null: the machine's
    cores, less the threads of trainer, rollouts and critic, dealt out to all environments of all rollouts, at most 4;
    for ``penstock play`` one. A class whose step is async has one process, whatever this is."""

    @field_validator("environment")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in REGISTRY and value.count(":") != 1:
            raise ValueError(f"{value!r} is neither module:Class nor one of {', '.join(sorted(REGISTRY))}")
        return value

    @field_validator("options")
    @classmethod
    def _of_tools(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if info.data.get("environment") == TOOLS:
            read_options(value)
        return value

    @model_validator(mode="after")
    def _calls_end_before_their_step(self) -> EnvironmentConfig:
        if tools := self.tools:
            tools.check_deadlines(self.timeout_s)
        return self

    @property
    def tools(self) -> ToolsConfig | None:
        """The options of ``tools``; None of other environments."""
        return read_options(self.options) if self.environment == TOOLS else None

    @property
    def settles(self) -> bool:
        """What ends before its object says so is asked for its reward."""
        return bool(self.tools and self.tools.class_)

    def program(self, key: str = KEY, reads: Mapping[str, Any] | None = None) -> Program:
        """For a worker; ``key`` is where it stands in the config, ``reads`` what `Tools` is told of a tokenizer."""
        handler, options = HANDLER, self.options
        if self.environment == TOOLS:
            handler, options = TOOLS_HANDLER, options | {"shows": self.pictures, "reads": reads}
        return Program(handler, REGISTRY.get(self.environment, self.environment), key, self.timeout_s, options)
