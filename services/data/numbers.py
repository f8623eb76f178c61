"""Tasks that agents have themselves: a prompt says no more than which one it is."""

from __future__ import annotations

from penstock.protocols.experience import Prompt
from penstock.services.data.config import NumbersData
from penstock.services.data.source import PromptSource


class NumbersSource(PromptSource):
    """As many as the config says, from its first one on."""

    def __init__(self, config: NumbersData) -> None:
        self._config = config

    def __len__(self) -> int:
        return self._config.size

    def prompt(self, index: int) -> Prompt:
        """See `PromptSource`."""
        number = self._config.first + index
        return Prompt(index=number, text=f"task {number}")
