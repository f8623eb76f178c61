"""Sources of prompts. A source is a sequence of `protocols.experience.Prompt`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from protocols.experience import Prompt
from services.broker.config import CustomData, DataConfig, HubData, ReasoningGymData, SortData
from services.section import SetupError


class DataError(SetupError):
    """A data source that cannot be opened, or a row that is no prompt; says which and what to do."""


def open_source(config: DataConfig, held_out: bool = False) -> Sequence[Prompt]:
    """The prompts of ``config``. ``held_out`` selects a procedural source's evaluation part."""
    if isinstance(config, SortData):
        from services.broker.data.sort import SortSource

        return SortSource(config, held_out)
    if isinstance(config, HubData):
        from services.broker.data.hub import HubSource

        return HubSource(config)
    if isinstance(config, ReasoningGymData):
        from services.broker.data.reasoning_gym import ReasoningGymSource

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
