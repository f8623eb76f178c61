"""Sources of prompts. A source is a sequence of `protocols.experience.Prompt`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from penstock.protocols.experience import Prompt
from penstock.services.data.config import (
    CustomData,
    DataConfig,
    HubData,
    MixData,
    NumbersData,
    ReasoningGymData,
    SortData,
)
from penstock.services.runtime.errors import PackageError, SetupError
from penstock.services.runtime.install import install


class DataError(SetupError):
    """A data source that cannot be opened, or a row that is no prompt; says which and what to do."""


def open_source(config: DataConfig, held_out: bool = False, key: str = "prompts.train") -> Sequence[Prompt]:
    """The prompts of ``config``, which stands at ``key`` of the run's config. ``held_out`` selects a procedural
    source's evaluation part. A row that is no prompt raises `DataError` when it is asked for."""
    if isinstance(config, SortData):
        from penstock.services.data.sort import SortSource

        return SortSource(config, held_out)
    if isinstance(config, HubData):
        from penstock.services.data.hub import HubSource

        return HubSource(config, key)
    if isinstance(config, NumbersData):
        from penstock.services.data.numbers import NumbersSource

        return NumbersSource(config)
    if isinstance(config, ReasoningGymData):
        from penstock.services.data.reasoning_gym import ReasoningGymSource

        return ReasoningGymSource(config, key, held_out)
    if isinstance(config, MixData):
        from penstock.services.data.mixture import Mixture

        parts = {name: open_source(part, held_out, f"{key}.sources.{name}") for name, part in config.sources.items()}
        return Mixture(parts, config.weights, key, config.named_by_rows)
    assert isinstance(config, CustomData)
    from penstock.services.data.custom import CustomSource

    return CustomSource(config, key)


class MissingError(DataError, PackageError):
    """What the data is read with is not installed."""


def need(module: str, extra: str, key: str) -> None:
    """Raises `MissingError` with the command that installs ``module``, where it is missing; ``key`` is what asks for
    it."""
    try:
        import_module(module)
    except ImportError:
        raise MissingError(f"{key}: {module} is not installed; run: {install(extra)}") from None
