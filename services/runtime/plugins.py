"""What users write themselves: functions and classes that a config names as ``module:name``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from penstock.services.runtime.errors import SetupError


class PluginError(SetupError):
    """Something named by a config that cannot be loaded; says the key, what was looked for, and where."""


def load_plugin(name: str, key: str) -> Any:
    """What ``module:name`` names. ``key`` is the config's, for errors. Raises `PluginError`."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise PluginError(f"{key}: {name!r} is not of the form module:name")
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        hint = "" if error.name and not module.startswith(error.name) else "; is its folder the one you started from?"
        raise PluginError(f"{key}: cannot load {name!r} as module:name: {error}{hint}") from error
    except Exception as error:  # importing a user's module may raise anything
        raise PluginError(f"{key}: cannot load {name!r} as module:name: {type(error).__name__}: {error}") from error
