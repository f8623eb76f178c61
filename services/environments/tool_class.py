"""A class of the user's whose methods are tools of the environment ``tools``: an object for each trajectory."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, get_type_hints

from penstock.protocols.experience import Prompt
from penstock.services.environments.threads import called

REWARDS = ("get_reward", "reward")
"""The first of these methods that there is gives the trajectory's reward."""
RESERVED = ("reset", "close", *REWARDS)
"""Methods that are no tools."""


@dataclass(frozen=True)
class Method:
    """A tool that is a method of the trajectory's own object."""

    call: Callable[..., Any]
    """The class's function, which takes the object first."""


def check_class(made: Any, name: str, options: Mapping[str, Any]) -> None:
    """Raises `ValueError` where ``made``, which the config calls ``name``, is no class that can be made with
    ``options``."""
    if not inspect.isclass(made):
        raise ValueError(f"class: {name} is a {type(made).__name__}; it must be a class")
    try:
        inspect.signature(made).bind(**options)
    except TypeError as error:
        raise ValueError(f"class: {name} cannot be made with class_options={dict(options)}: {error}") from None
    methods = methods_of(made)
    if not methods:
        raise ValueError(
            f"class: {name} has no method that could be a tool: a public one, other than {', '.join(RESERVED)}"
        )
    for method, function in methods.items():
        if not inspect.getdoc(function):
            raise ValueError(
                f"class: {name}.{method} has no docstring, by which the policy is told of it; write one, or call it "
                f"_{method} where it is no tool"
            )


def methods_of(made: type) -> dict[str, FunctionType]:
    """The methods of a class that are tools, by name, as they were written; its base classes' first."""
    names = dict.fromkeys(name for each in reversed(made.__mro__[:-1]) for name in vars(each))
    found = {name: inspect.getattr_static(made, name) for name in names if name not in RESERVED}
    return {name: it for name, it in found.items() if isinstance(it, FunctionType) and not name.startswith("_")}


def waits(made: type) -> bool:
    """Something of it is async."""
    others = (getattr(made, name, None) for name in RESERVED)
    return any(map(inspect.iscoroutinefunction, (*methods_of(made).values(), *others)))


class ToolObject:
    """The object of one trajectory. What its own code raises in ``reset`` and ``reward`` is raised here, and costs its
    trajectory."""

    def __init__(self, made: type, options: Mapping[str, Any], here: bool) -> None:
        """``here``: see `threads.called`."""
        self._made, self._options, self._here = made, options, here
        self._object: Any = None
        self._one_call = asyncio.Lock()
        """Its methods run one at a time, in the order of their calls: what they change is its own."""

    async def reset(self, prompt: Prompt) -> Any:
        """Makes it, and calls its reset. Returns the messages that the task begins with, None for its prompt as it is:
        text that reset returns stands behind the prompt's last words, messages stand in its place."""
        self._object = await called(self._made, self._options, self._here)
        reset = getattr(self._object, "reset", None)
        found = await called(reset, told_to(reset, prompt), self._here) if reset else None
        if not isinstance(found, str):
            return found
        if prompt.messages is None:
            return prompt.as_text() + found
        *before, last = prompt.messages
        return [*before, {**last, "content": last["content"] + found}]

    async def call(self, method: Method, arguments: Mapping[str, Any]) -> Any:
        """What the method returns."""
        async with self._one_call:
            return await called(MethodType(method.call, self._object), arguments, self._here)

    async def reward(self) -> float | None:
        """The trajectory's; None where its class gives none. Raises `ValueError` for what is no number."""
        method = next((found for name in REWARDS if callable(found := getattr(self._object, name, None))), None)
        if method is None:
            return None
        async with self._one_call:
            given = await called(method, {}, self._here)
        try:
            return float(given)
        except (TypeError, ValueError):
            raise ValueError(f"{method.__name__} returned {type(given).__name__}, not a number") from None

    async def close(self) -> None:
        """Calls its close, if it has one."""
        if callable(close := getattr(self._object, "close", None)):
            await called(close, {}, self._here)


def told_to(reset: Callable[..., Any], prompt: Prompt) -> dict[str, Any]:
    """What ``reset`` asks for: by name the columns of the row, where the truth is one, and ``truth``; and the prompt,
    where it is annotated as such, or called ``prompt`` and no column is. Raises `ValueError` for anything else."""
    parameters = inspect.signature(reset).parameters.values()
    row = prompt.truth if isinstance(prompt.truth, dict) else {}
    there = {"truth": prompt.truth, "prompt": prompt, **row, **dict.fromkeys(prompted(reset), prompt)}
    rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
    asks = {p.name: p.default is p.empty for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    if strange := [name for name, required in asks.items() if required and name not in there]:
        has = ", ".join(map(str, row)) or "no columns"
        whole = "prompts.train.truth_key=null gives the whole row"
        raise ValueError(f"reset asks for {', '.join(strange)}, and the truth of its row has {has}; {whole}")
    return (row if rest else {}) | {name: there[name] for name in asks if name in there}


def prompted(function: Callable[..., Any]) -> list[str]:
    """The parameters that are annotated as a prompt."""
    try:
        hints = get_type_hints(function)
    except (TypeError, NameError):  # no function, or what it names is not there
        return []
    return [name for name, hint in hints.items() if name != "return" and hint is Prompt]
