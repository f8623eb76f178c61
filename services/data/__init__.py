"""Sources of prompts. A source is a sequence of `protocols.experience.Prompt`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from penstock.protocols.experience import Prompt
from penstock.services.data.config import CustomData, DataConfig, HubData, ReasoningGymData, SortData
from penstock.services.runtime.errors import SetupError


class DataError(SetupError):
    """A data source that cannot be opened, or a row that is no prompt; says which and what to do."""


def open_source(config: DataConfig, held_out: bool = False) -> Sequence[Prompt]:
    """The prompts of ``config``. ``held_out`` selects a procedural source's evaluation part."""
    if isinstance(config, SortData):
        from penstock.services.data.sort import SortSource

        return SortSource(config, held_out)
    if isinstance(config, HubData):
        from penstock.services.data.hub import HubSource

        return HubSource(config)
    if isinstance(config, ReasoningGymData):
        from penstock.services.data.reasoning_gym import ReasoningGymSource

        return ReasoningGymSource(config)
    assert isinstance(config, CustomData)
    module, _, name = config.function.partition(":")
    try:
        source = getattr(import_module(module), name)(**config.options)
    except (ImportError, AttributeError, ValueError) as error:
        raise DataError(f"prompts: cannot load {config.function!r} as module:function: {error}") from error
    return source


def need(module: str, extra: str) -> None:
    """Raises `DataError` with the command that installs ``module``, where it is missing."""
    try:
        import_module(module)
    except ImportError:
        raise DataError(f"{module} is not installed; run: pip install 'penstock[{extra}]'") from None
