"""A reward function in the process that runs it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

from penstock.protocols.experience import MOST_REWARD, Prompt
from penstock.services.reward.groups import OF_GROUP
from penstock.services.reward.other_forms import (
    EXTRA,
    FOR_LISTS,
    LISTS,
    NAMES,
    ROW,
    TURNS,
    columns_of,
    extra_with,
    in_lists,
)
from penstock.services.runtime.plugins import load_plugin

OFFERED = (
    "response", "response_tokens", "turns", "truth", "source", "prompt", "messages", "finish_reason", "group", "sample",
    "step", "pictures",
)  # fmt: skip
"""What a function may ask for by name, beside its options and the columns that its config names."""
SCORE = "score"
"""Of a function that returns several numbers, the name of its reward."""


def of_prompt(prompt: Prompt) -> dict[str, Any]:
    """Those of `OFFERED` that are the prompt's; pictures are a trajectory's, since an environment may show some."""
    return {
        "truth": prompt.truth,
        "source": prompt.source,
        "prompt": prompt.as_text(),
        "messages": prompt.as_messages(),
    }


class _Takes(NamedTuple):
    """What a function has parameters for."""

    names: frozenset[str]
    required: frozenset[str]
    """Those without a default."""
    rest: bool
    """Any other, too."""


def _takes(call: Callable[..., Any]) -> _Takes:
    parameters = inspect.signature(call).parameters.values()
    names = frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    rest = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    required = frozenset(p.name for p in parameters if p.default is p.empty and p.kind not in rest)
    return _Takes(names, required, any(p.kind is p.VAR_KEYWORD for p in parameters))


class RewardFunction:
    """The function with its options, its timeout and what it asks for."""

    def __init__(self, program: dict[str, Any]) -> None:
        self.call: Callable[..., Any] = load_plugin(program["function"], f"{program['key']}.function")
        if not callable(self.call):
            raise ValueError(
                f"{program['key']}.function: {program['function']} is a {type(self.call).__name__}, which "
                "cannot be called"
            )
        self._where = f"{program['key']}: {program['function']}"
        self.is_async = inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(
            getattr(self.call, "__call__", None)  # noqa: B004 - an object whose __call__ is async
        )
        self.options, self.timeout_s, self._also = program["options"], program["timeout_s"], program["also"]
        self._takes = _takes(self.call)
        self.asks = self._asks([*OFFERED, *program["columns"]])

    def _asks(self, offered: list[str]) -> list[str]:
        """Of what is ``offered``, what the function takes. Raises `ValueError` where it wants something else."""
        takes = self._takes
        self._verls = [name for name in NAMES if name in takes.names and name not in (*offered, *self.options)]
        if strange := sorted(takes.required - {*offered, *self._verls} - self.options.keys()):
            raise ValueError(
                f"{self._where} asks for {', '.join(strange)}; it may ask for {', '.join(offered)}, and for what its "
                "options give; with prompts.train.truth_key=null truth is the whole row, a map of its columns"
                + f"; a function of TRL's, with {LISTS}, wants whole_group: true"
                * (LISTS in strange)
            )
        if not takes.rest and (strange := sorted(self.options.keys() - takes.names)):
            raise ValueError(f"{self._where} does not take {', '.join(strange)}, which its options give")
        self._own = [name for name in offered if name not in self.options and (takes.rest or name in takes.names)]
        counted = [TURNS] * (EXTRA in self._verls)
        return list(dict.fromkeys([*self._own, *(NAMES[name] for name in self._verls), *counted]))

    def start(self, arguments: dict[str, Any]) -> Any:
        """See `Handler.start`."""
        own = {name: arguments[name] for name in self._own}
        verls = {name: arguments[NAMES[name]] for name in self._verls}
        return self.call(**own, **self._as_verl(verls, arguments), **self.options)

    def _as_verl(self, verls: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
        """``verls``, what is passed by its names, with what it tells of one answer in `EXTRA`."""
        return verls | ({EXTRA: extra_with(verls[EXTRA], arguments[TURNS])} if EXTRA in verls else {})

    def answer(self, value: Any) -> dict[str, Any]:
        """See `Handler.answer`: its reward, and behind it the numbers that `also` names, each finite and at most
        `MOST_REWARD`."""
        several = value if isinstance(value, Mapping) else {SCORE: value}
        if self._also and several is not value:
            names = ", ".join([SCORE, *self._also])
            return {"error": f"returned {type(value).__name__}, not a dict with {names} (its key `also`)"}
        numbers = []
        for name in [SCORE, *self._also]:
            if name not in several:
                return {"error": f"returned a dict without {name!r}"}
            try:
                numbers.append(_number(several[name]))
            except ValueError as error:
                return {"error": f"returned {error}" + (f" for {name!r}" if several is value else "")}
        return {"value": numbers}


def _number(value: Any) -> float:
    """Raises `ValueError`, which says what else it is."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{type(value).__name__}, not a number") from None
    except OverflowError:
        raise ValueError(f"{type(value).__name__} that no float holds") from None
    if not math.isfinite(found) or abs(found) > MOST_REWARD:
        raise ValueError(f"{found}" + f", beyond {MOST_REWARD:g}" * math.isfinite(found))
    return found


class GroupRewardFunction(RewardFunction):
    """One that is called once for all answers to a prompt: by our names, or as TRL calls it, where it has `LISTS`."""

    def _asks(self, offered: list[str]) -> list[str]:
        self._of_trl = LISTS in self._takes.names and LISTS not in (*offered, *self.options)
        if not self._of_trl:
            return super()._asks(offered)
        return list(dict.fromkeys([*FOR_LISTS, *(name for name in offered if name in self._takes.names)]))

    def _as_verl(self, verls: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
        return verls  # given once, of all answers; nor does verl's own of whole batches say more

    def start(self, arguments: dict[str, Any]) -> Any:
        """See `Handler.start`. Raises `ValueError` where one of TRL's asks for what the row has not."""
        if not self._of_trl:
            return super().start(arguments)
        there, takes = in_lists(arguments, OF_GROUP), self._takes
        columns = columns_of(arguments) if takes.rest else ()
        if strange := sorted(takes.required - there.keys() - self.options.keys()):
            has = ", ".join(map(str, arguments[ROW])) or "no columns"
            whole = "prompts.train.truth_key=null gives the whole row"
            raise ValueError(f"it asks for {', '.join(strange)}, and the truth of its row has {has}; {whole}")
        passed = {*takes.names, *columns, *(("prompts", LISTS) if takes.rest else ())}
        given = {name: there[name] for name in there if name in passed}
        return self.call(**given | self.options)

    def answer(self, value: Any) -> dict[str, Any]:
        """A list with what `RewardFunction.answer` says of each; of None that there is no reward."""
        try:
            if isinstance(value, Mapping | str | bytes | Set):  # whose parts are no rewards, or in no order
                raise TypeError
            several = list(value)
        except TypeError:
            return {"error": f"returned {type(value).__name__}, not a list of numbers"}
        remedy = "; say which rows it judges: its sources, with prompts.train.source_key" * self._of_trl
        none = {"error": f"returned None: it has no reward for this answer{remedy}"}
        return {"value": [none if each is None else super(GroupRewardFunction, self).answer(each) for each in several]}
