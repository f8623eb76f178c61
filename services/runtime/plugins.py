"""What users write themselves: functions and classes that a config names as ``module:name``."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.nearest import hint
from penstock.services.runtime.plain import plain
from penstock.services.runtime.user_folders import folders

_OURS = Path(__file__).resolve().parents[2]


class PluginError(SetupError):
    """Something named by a config that cannot be loaded; says the key, what was looked for, and where."""


class UserCodeError(RuntimeError):
    """A function of the user's own raised, or returned what it may not; says the key, the function, file and line."""


def load_plugin(name: str, key: str) -> Any:
    """What ``module:name`` names. ``key`` is the config's, for errors. Raises `PluginError`."""
    path, colon, attribute = name.removeprefix("./").partition(":")
    if not (path and colon and attribute):
        raise PluginError(f"{key}: {name!r} is not of the form module:name, e.g. my_module:my_function")
    for folder in folders():
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    _refuse_hidden(path, name, key)
    try:
        module = import_module(path)
    except ModuleNotFoundError as error:
        if error.name and f"{path}.".startswith(f"{error.name}."):
            if path.endswith(".py"):
                raise PluginError(
                    f"{key}: {name!r} names a file; say its module: {Path(path).stem}:{attribute}"
                ) from error
            looked = ", ".join(map(str, folders()))
            why = f"looked in {looked}, and among the installed packages{_near(path)}"
        else:
            why = f"imported by it{blame(error)}; is that installed?"
        raise PluginError(f"{key}: cannot load {name!r} as module:name: {error}; {why}") from error
    except (Exception, SystemExit) as error:  # importing a user's module may raise anything, or end the process
        raise PluginError(f"{key}: cannot load {name!r} as module:name: {describe(error)}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise PluginError(f"{key}: cannot load {name!r} as module:name: {_lacks(module, attribute)}") from None


@contextmanager
def user_code(key: str, name: str) -> Iterator[None]:
    """What is raised inside becomes a `UserCodeError` that names key, function, file and line."""
    try:
        yield
    except UserCodeError:
        raise
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"{key}: {name} raised {describe(error)}") from error


def describe(error: BaseException) -> str:
    """Type, message, and the user's own file and line, where the error came through one; in one line."""
    return plain(f"{type(error).__name__}: {error}{blame(error)}")


def blame(error: BaseException) -> str:
    """ " (FILE, line N)": the innermost line of the user's own that ``error`` came through; empty where it came through
    none."""
    if isinstance(error, SyntaxError):
        return ""  # its own words have it
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _is_users(file: str) -> bool:
    path = Path(file)
    if file.startswith("<") or "site-packages" in path.parts or path.is_relative_to(sysconfig.get_path("stdlib")):
        return False
    return not any(path.is_relative_to(_OURS / part) for part in ("pipeline", "services", "protocols", "penstock"))


def _refuse_hidden(path: str, name: str, key: str) -> None:
    """A file of the user's that Python passes over, since something else of that name comes first, is told of: what is
    found instead is never what was meant."""
    top = path.partition(".")[0]
    candidates = (found for folder in folders() for found in (folder / f"{top}.py", folder / top))
    mine = next((found for found in candidates if found.is_file() or (found / "__init__.py").is_file()), None)
    if mine is None or top == "penstock":
        return
    spec = importlib.util.find_spec(top) if top not in sys.modules else sys.modules[top].__spec__
    if spec is None:
        return
    taken = [Path(place).resolve() for place in ([spec.origin] if spec.origin else [])]
    taken += [Path(place).resolve() for place in (spec.submodule_search_locations or ())]
    if not any(place == mine.resolve() or place.parent == mine.resolve() for place in taken):
        where = spec.origin or "a built-in module"
        raise PluginError(
            f"{key}: {name!r}: {mine} is hidden by another module that is called {top} ({where}); give yours another "
            f"name, e.g. my_{top}"
        )


def _near(path: str) -> str:
    """A hint at a file of a like name."""
    names = {file.stem for folder in folders() for file in folder.glob("*.py")}
    return hint(path.rpartition(".")[2], names)


def _lacks(module: ModuleType, attribute: str) -> str:
    names = [name for name in vars(module) if not name.startswith("_")]
    return f"{module.__file__ or module.__name__} has no {attribute!r}{hint(attribute, names)}"
