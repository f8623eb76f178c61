"""The base of every data source: a sequence of prompts that are made when they are asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import overload

from penstock.protocols.experience import Prompt
from penstock.services.data import DataError


class PromptSource(Sequence[Prompt]):
    """A source says how many prompts there are, and makes one. Whatever a row has it raise is a `DataError`."""

    @abstractmethod
    def prompt(self, index: int) -> Prompt:
        """Prompt ``index``, from 0. May raise `DataError` for a row that is none."""

    def unshown(self) -> list[str]:
        """Its columns of pictures that no prompt shows, since nothing names them."""
        return []

    def untold(self) -> list[str]:
        """Columns that others tell a chat template by their names, and that nothing names here: as `hub.TOLD`."""
        return []

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        try:
            return self.prompt(index)
        except DataError:
            raise
        except Exception as error:  # a library's decoder or generator may raise anything; it costs this row alone
            raise DataError(f"row {index}: {type(error).__name__}: {error}") from error
