"""A tracker of the user's own: a class that the config names under ``run.trackers``.

class Board:                                      # run.trackers: ["my_trackers:Board"]
    def __init__(self, folder, project, config):  # whichever of these it asks for
        ...

    def log(self, step, values): ...              # numbers by name
    def table(self, name, columns, rows): ...     # optional
    def close(self): ...                          # optional
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.services.broker.tracker_libraries import Columns, Rows
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.plugins import load_plugin, user_code

KEY = "run.trackers"
OFFERED = ("folder", "project", "config")
"""What a class may ask for by name."""
METHODS = {"log": ("step", "values"), "table": ("name", "columns", "rows"), "close": ()}


class OwnTracker:
    """The class called ``name``, as any other tracker. Raises `SetupError`; what the user's code raises becomes a
    `UserCodeError`."""

    def __init__(self, name: str, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        self._name, made = name, find(name)
        offered = {"folder": folder, "project": project, "config": dict(config)}
        with user_code(KEY, name):
            self._tracker = made(**{each: offered[each] for each in _asked(name, made)})
        if not callable(getattr(self._tracker, "log", None)):
            raise SetupError(f"{KEY}: {name} has no method log(step, values)")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `trackers.Tracker`."""
        self._call("log", step, dict(values))

    def table(self, name: str, columns: Columns, rows: Rows) -> None:
        """See `trackers.Tracker`."""
        self._call("table", name, list(columns), [list(row) for row in rows])

    def close(self, _error: str | None) -> None:
        """See `trackers.Tracker`."""
        self._call("close")

    def _call(self, method: str, *arguments: Any) -> None:
        if method == "log" or hasattr(self._tracker, method):
            with user_code(KEY, f"{self._name}.{method}"):
                getattr(self._tracker, method)(*arguments)


def find(name: str) -> Any:
    """The class, which can be made and called as it will be. Raises `SetupError`."""
    made = load_plugin(name, KEY)
    if not callable(made):
        raise SetupError(f"{KEY}: {name} is a {type(made).__name__}, not a class")
    _asked(name, made)
    if not inspect.isclass(made):
        return made  # a function that makes one: what it gives is not known yet
    for method, arguments in METHODS.items():
        function = getattr(made, method, None)
        if function is None and (method != "log" or made.__init__ is not object.__init__):
            continue  # it may be given one where it is made
        if not callable(function):
            raise SetupError(f"{KEY}: {name} has no method log(step, values)")
        alone = isinstance(inspect.getattr_static(made, method), staticmethod | classmethod)
        try:
            inspect.signature(function).bind(*(() if alone else (made,)), *arguments)
        except TypeError as error:
            raise SetupError(
                f"{KEY}: {name}.{method} cannot be called with ({', '.join(arguments)}): {error}"
            ) from None
        except ValueError:
            pass  # one without a signature that can be read
    return made


def _asked(name: str, made: Any) -> list[str]:
    """Of `OFFERED`, what it takes. Raises `SetupError` where it wants something else."""
    try:
        parameters = inspect.signature(made).parameters.values()
    except ValueError:  # it has none that can be read
        return []
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return list(OFFERED)
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = {p.name for p in parameters if p.default is p.empty and p.kind not in optional}
    if strange := sorted(required - set(OFFERED)):
        raise SetupError(f"{KEY}: {name} asks for {', '.join(strange)}; it may ask for {', '.join(OFFERED)}")
    return [each for each in OFFERED if any(each == parameter.name for parameter in parameters)]
