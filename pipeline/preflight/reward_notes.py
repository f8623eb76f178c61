"""What one should know of rewards that work: whether they go together with the rest of the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.pipeline.config import Config
from penstock.protocols.columns import REWARD
from penstock.services.broker.config import RangeFilter
from penstock.services.reward.config import FunctionConfig
from penstock.services.reward.functions.overlong import overlong

TRUTH = "the truth"
"""What an answer that is the row's truth is called."""
Given = Mapping[tuple[str, str], list[float]]
"""What a function gave, by the source of the row and the answer that it was tried on."""


def never_reached(function: FunctionConfig, key: str, config: Config) -> str:
    """Of `overlong`, at ``key``, where answers end before its punishment does; else empty."""
    most, longest = config.rollout.sampling.max_new_tokens, function.options.get("longest")
    several_turns = bool(config.gateway.count or config.rollout.all_environments)
    if function.function != "overlong" or several_turns or not isinstance(longest, int):
        return ""
    if most is None or longest <= most:
        return ""
    try:
        worst = overlong(most, **function.options)
    except (TypeError, ValueError):  # the trial says so
        return ""
    smaller = ", and a smaller buffer" if function.options.get("buffer", 0) > most else ""
    return (
        f"{key}.options.longest={longest}: an answer has rollout.sampling.max_new_tokens={most} at most, so that the "
        f"punishment ends at {worst + 0.0:g}, and not at -1; set longest={most}{smaller}"
    )


def left_out(config: Config, given: list[tuple[FunctionConfig, Given]]) -> Iterator[str]:
    """Where ``given`` values lie so far beyond the bounds of `replay.filter` that good groups are left out."""
    rule = config.replay.filter
    if not isinstance(rule, RangeFilter):
        return
    values = _sums(config, given) if rule.column == REWARD else _of_column(rule.column, given)
    for source in [source for source, answer in values if answer == TRUTH]:
        found = [value for at, value in values.items() if at[0] == source]
        least, most, middle = min(found), max(found), (min(found) + max(found)) / 2
        if least < 0 <= rule.low and middle <= rule.low:
            yield _bound("low", rule.low, "less", "right", rule.column, least)
        elif most > 1 >= rule.high and middle >= rule.high:
            yield _bound("high", rule.high, "more", "wrong", rule.column, most)


def _bound(name: str, bound: float, more: str, half: str, column: str, value: float) -> str:
    return (
        f"replay.filter.{name}={bound:g}: {column} was {value:g} when it was tried, and groups with a mean of {name} "
        f"or {more} are left out, those that are half {half} among them, if that is what the worst answer has; then "
        f"set replay.filter.{name}={value:g}, or filter by a column that is 0 or 1 (docs/scoring.md)"
    )


def _of_column(column: str, given: list[tuple[FunctionConfig, Given]]) -> dict[tuple[str, str], float]:
    for function, gave in given:
        if column in function.terms:
            return {at: numbers[list(function.terms).index(column)] for at, numbers in gave.items()}
    return {}


def _sums(config: Config, given: list[tuple[FunctionConfig, Given]]) -> dict[tuple[str, str], float]:
    """The whole reward, where all that it is made of was tried."""
    if config.reward.columns:
        return {}
    sums = {}
    for at in {at for _, gave in given for at in gave}:
        asked = [each for each in config.reward.functions if not each.sources or at[0] in each.sources]
        terms = [(function, gave[at]) for function, gave in given if at in gave]
        if len(terms) == len(asked):
            sums[at] = sum(
                weight * number
                for function, numbers in terms
                for weight, number in zip(function.terms.values(), numbers, strict=True)
            )
    return sums
