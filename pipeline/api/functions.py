"""Functions and classes of a script or a notebook, written down as a module that a run's processes can import.

What is in a module already is named. What was defined in the script that runs, or in a notebook, is written with its
source, the imports, the plain values and the other functions that it uses: as text, which a person can read, and which
is there when the run goes on another day.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import site
import symtable
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.pipeline.config import ConfigError

PACKAGE = __name__.partition(".")[0]
LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")
PLAIN = (type(None), bool, int, float, str, bytes, dict, list, tuple, set)
Defined = Callable[..., Any] | type


class Functions:
    """What a run is given by ``module``, a name that nothing else has; `folders` are where other modules lie."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._imports: dict[str, str] = {}
        self._parts: dict[str, str] = {}
        """By name: assignments and definitions, in the order in which they are needed."""
        self._known: dict[str, Any] = {}
        """By name: what is imported or defined by it."""
        self.folders: list[Path] = []

    def name(self, value: Defined, key: str) -> str:
        """``module:name`` of ``value``, which the argument ``key`` has given. Raises `ConfigError`."""
        if not isinstance(value, type) and not inspect.isroutine(value):
            raise ConfigError(f"{key}: give a function or a class, not {value!r}")
        module = sys.modules.get(value.__module__)
        of_file = value.__module__ != "__main__" and module is not None and getattr(module, "__file__", None)
        if module is not None and of_file and (name := _name_in(vars(module), value)) is not None:
            self._find(module)
            return f"{module.__name__}:{name}"
        name = None if "." in value.__qualname__ else _name_in(_around(value), value)
        if name is None:
            raise ConfigError(
                f"{key}: {value.__qualname__} has no name that another process could find it by; define it with def "
                "at the top of the script, the cell or a module"
            )
        self._define(name, value, key)
        return f"{self._module}:{name}"

    @property
    def source(self) -> str:
        """The module's text; empty where nothing had to be written."""
        if not self._parts:
            return ""
        about = '"""Written by penstock.Trainer, from the script or notebook that started the run."""'
        first = "from __future__ import annotations"
        return "\n\n".join([about, first, "\n".join(self._imports.values()), *self._parts.values()]) + "\n"

    def _define(self, name: str, value: Any, key: str) -> None:
        if name in self._known:
            if self._known[name] is not value:
                raise ConfigError(f"{key}: two different things are called {name}; give one of them another name")
            return
        self._known[name] = value
        if isinstance(value, ModuleType):
            self._imports[name] = f"import {value.__name__} as {name}"
            self._find(value)
        elif _is_plain(value):
            self._parts[name] = f"{name} = {value!r}"
        elif type(value) is float:  # infinity, or not a number
            self._parts[name] = f"{name} = float({str(value)!r})"
        elif isinstance(value, re.Pattern):
            self._imports["re"] = "import re"
            self._parts[name] = f"{name} = re.compile({value.pattern!r}, {value.flags})"
        elif (found := _importable(value)) is not None:
            self._imports[name] = found if found.endswith(f" {name}") else f"{found} as {name}"
            self._find(sys.modules[value.__module__])
        elif isinstance(value, type) or inspect.isfunction(value):
            self._write(name, value, key)
        else:
            raise ConfigError(
                f"{key}: it uses {name}, a {type(value).__name__} of this script, which cannot be written down for the "
                "run's processes; make it inside the function, or put both into a module of their own"
            )

    def _write(self, name: str, value: Defined, key: str) -> None:
        try:
            source = textwrap.dedent(inspect.getsource(value))
        except (OSError, TypeError) as error:
            raise ConfigError(f"{key}: the source of {name} is not known ({error}); put it into a module") from None
        known = _around(value)
        _refuse_unnamed(name, value, source, known, key)
        if value.__name__ != name:
            self._define(value.__name__, value, key)
            self._parts[name] = f"{name} = {value.__name__}"
            return
        for used in _names(source):
            if used in known and used != name and not _is_builtin(used, known[used]):
                self._define(used, known[used], key)
        for module in _modules(source, known):  # such as xml.dom.minidom, which binds xml alone
            self._imports[module] = f"import {module}"
            self._find(sys.modules[module])
        self._parts[name] = source.strip()  # behind what it needs

    def _find(self, module: ModuleType) -> None:
        """The run's processes look for ``module`` where it lies, unless every Python finds it."""
        file = getattr(module, "__file__", None)
        if file is None or module.__name__.split(".")[0] == PACKAGE:
            return
        depth = module.__name__.count(".") + hasattr(module, "__path__")
        folder = Path(file).resolve().parents[depth]
        if folder not in self.folders and not any(folder.is_relative_to(installed) for installed in _installed()):
            self.folders.append(folder)


def _installed() -> set[Path]:
    """Where the standard library and installed packages lie."""
    found = (*map(sysconfig.get_path, LIBRARIES), *site.getsitepackages(), site.getusersitepackages())
    return {Path(path).resolve() for path in found}


def _is_plain(value: Any) -> bool:
    """What Python writes of it is what it is."""
    if type(value) not in PLAIN:
        return False
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


def _importable(value: Any) -> str | None:
    """The line that imports it; None where there is none."""
    module, own = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if module in (None, "__main__") or module not in sys.modules or not isinstance(own, str):
        return None
    name = _name_in(vars(sys.modules[module]), value)
    return f"from {module} import {name}" if name else None


def _name_in(names: Mapping[str, Any], value: Defined) -> str | None:
    """What ``value`` is called there, which need not be what it calls itself: `functools.wraps` copies the name of what
    is wrapped. None where it has no name there."""
    if names.get(value.__name__) is value:
        return value.__name__
    return next((name for name, other in names.items() if other is value), None)


def _around(value: Defined) -> dict[str, Any]:
    """Everything that the code of ``value`` sees, by name."""
    return vars(sys.modules["__main__"]) | (getattr(inspect.unwrap(value), "__globals__", None) or {})


def _refuse_unnamed(name: str, value: Defined, source: str, known: Mapping[str, Any], key: str) -> None:
    """Raises `ConfigError` where ``source`` at the top of a module would not make ``value``."""
    inner: Any = inspect.unwrap(value)
    if inner.__name__ == "<lambda>" or "." in inner.__qualname__ or getattr(inner, "__closure__", None):
        raise ConfigError(
            f"{key}: {name} is a lambda, a method, or a function inside a function, which cannot be written down for "
            "the run's processes; define it with def at the top of the script, the cell or a module"
        )
    if inner is value:
        return
    wrappers, wrapped = 0, value
    while wrapped is not inner:
        wrappers, wrapped = wrappers + 1, wrapped.__wrapped__  # type: ignore[union-attr]
    definition = ast.parse(source).body[0]
    if known.get(inner.__name__) is not value or wrappers > len(getattr(definition, "decorator_list", ())):
        raise ConfigError(
            f"{key}: {name} wraps {inner.__name__}, and how cannot be written down for the run's processes; wrap it "
            "where it is defined, with @, or put both into a module of their own"
        )


def _is_builtin(name: str, value: Any) -> bool:
    """Every Python has it by that name; a notebook has an ``open`` of its own."""
    of_notebook = getattr(value, "__globals__", {}).get("__name__", "").startswith("IPython.")
    return hasattr(builtins, name) and (of_notebook or value is getattr(builtins, name))


def _names(source: str) -> list[str]:
    """What the code reads that it does not define itself, as far as that can be seen."""
    top = symtable.symtable(source, "<source>", "exec")
    found = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced() and not symbol.is_assigned()}
    scopes = list(top.get_children())
    while scopes:
        scope = scopes.pop()
        found |= {symbol.get_name() for symbol in scope.get_symbols() if symbol.is_global() and symbol.is_referenced()}
        scopes += scope.get_children()
    return sorted(found - {name for name in vars(builtins) if name.startswith("__")})


def _modules(source: str, known: Mapping[str, Any]) -> list[str]:
    """Modules inside packages that the code reads by their whole names."""
    dotted = {ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    found = [name for name in sorted(dotted) if isinstance(sys.modules.get(name), ModuleType)]
    return [name for name in found if known.get(top := name.partition(".")[0]) is sys.modules.get(top)]
