"""Penstock: asynchronous reinforcement learning for language models.

The door for people: what a data source, a reward or a script of your own needs has a name here. Everything else is in
``penstock.protocols``, ``penstock.services`` and ``penstock.pipeline``. Nothing is loaded before it is asked for.

    >>> from penstock import Prompt
    >>> Prompt(index=0, text="sort ba=", truth="ab").as_text()
    'sort ba='
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_DOOR = {
    "AgentClient": "penstock.protocols.agent_client",
    "AgentRefusedError": "penstock.protocols.agent_client",
    "AsyncAgentClient": "penstock.protocols.agent_client",
    "Config": "penstock.pipeline.config",
    "ConfigError": "penstock.pipeline.config",
    "DeadlineError": "penstock.protocols.mailbox",
    "Group": "penstock.protocols.experience",
    "Prompt": "penstock.protocols.experience",
    "Run": "penstock.pipeline.api.run",
    "RunFailed": "penstock.pipeline.api.run",
    "RunOver": "penstock.protocols.agent_client",
    "Trainer": "penstock.pipeline.api.trainer",
    "Trajectory": "penstock.protocols.experience",
    "Turn": "penstock.protocols.turn",
    "load_config": "penstock.pipeline.config",
    "rollouts": "penstock.pipeline.tools.rollouts",
}
__all__ = ["__version__", *sorted(_DOOR)]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("penstock")
    if name in _DOOR:
        return getattr(import_module(_DOOR[name]), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return list(__all__)
