"""Procedural tasks of reasoning-gym, with what their scorers need."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import overload

from penstock.protocols.experience import Prompt
from penstock.services.data import DataError, need
from penstock.services.data.config import ReasoningGymData
from penstock.services.data.hub import make_prompt


class ReasoningGymSource(Sequence[Prompt]):
    """One task set. The truth carries its name and the entry, which `reward` function ``reasoning_gym`` scores by."""

    def __init__(self, config: ReasoningGymData) -> None:
        need("reasoning_gym", "reasoning-gym")
        import reasoning_gym

        self._config = config
        try:
            self._tasks = reasoning_gym.create_dataset(
                config.task, size=config.size, seed=config.seed, **config.options
            )
        except Exception as error:  # an unknown task, or options that it does not take
            raise DataError(f"prompts: reasoning-gym task {config.task!r}: {error}") from error

    def __len__(self) -> int:
        return self._config.size

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        entry = json.loads(json.dumps(self._tasks[index], default=str))
        question = entry["question"] + self._config.suffix
        truth = {"task": self._config.task, "entry": entry}
        return make_prompt(index, question, truth, self._config.chat, self._config.system)
