"""A source of the user's own, held to what a source is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.protocols.experience import Prompt
from penstock.services.data import DataError
from penstock.services.data.config import CustomData
from penstock.services.data.source import PromptSource
from penstock.services.data.template import telling, with_template
from penstock.services.runtime.plugins import describe, load_plugin

EXAMPLE = 'penstock.Prompt(index=0, text="2+2=", truth="4")'


class CustomSource(PromptSource):
    """The sequence that the user's function returns. What it raises for a row, or gives instead of a prompt, is that
    row's alone."""

    def __init__(self, config: CustomData, key: str) -> None:
        self._name, self._key = config.function, f"{key}.function"
        self._template, self._told = config.template, config.chat_template_kwargs
        made = load_plugin(config.function, self._key)
        try:
            rows: Any = made(**config.options)
            if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")) or isinstance(rows, dict | str | bytes):
                raise DataError(
                    f"{self._key}: {self._name} returned a {type(rows).__name__}; it must return a sequence of "
                    f"penstock.Prompt, with a length and rows by number: a list, say"
                )
            self._size = len(rows)
        except DataError:
            raise
        except (Exception, SystemExit) as error:  # the user's own code
            raise DataError(f"{self._key}: {self._name} raised {describe(error)}") from error
        self._rows: Sequence[Any] = rows

    def __len__(self) -> int:
        return self._size

    def prompt(self, index: int) -> Prompt:
        """See `PromptSource`."""
        try:
            row = self._rows[index]
        except DataError:
            raise
        except Exception as error:  # the user's own code
            raise DataError(f"row {index}: {self._name} raised {describe(error)}") from error
        if not isinstance(row, Prompt):
            raise DataError(
                f"row {index}: {self._key}: {self._name} gave a {type(row).__name__}, not a penstock.Prompt; "
                f"e.g. {EXAMPLE}"
            )
        return telling(with_template(row, self._template), self._told)
