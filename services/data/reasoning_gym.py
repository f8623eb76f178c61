"""Procedural tasks of reasoning-gym, with what their scorers need."""

from __future__ import annotations

import json

from penstock.protocols.experience import Prompt
from penstock.services.data import DataError, need
from penstock.services.data.config import ReasoningGymData
from penstock.services.data.hub import make_prompt
from penstock.services.data.source import PromptSource
from penstock.services.data.template import telling

HELD_OUT = 1 << 30
"""Added to the seed of an evaluation's tasks: a task follows from the sum of seed and row, so that seeds which lie
nearer than there are rows give the same ones."""


class ReasoningGymSource(PromptSource):
    """One task set; ``held_out``: of evaluations, whose tasks are other ones. The truth carries its name and the entry,
    which `reward` function ``reasoning_gym`` scores by."""

    def __init__(self, config: ReasoningGymData, key: str, held_out: bool = False) -> None:
        need("reasoning_gym", "reasoning-gym", key)
        import reasoning_gym

        self._config = config
        try:
            seed = config.seed + HELD_OUT * held_out
            self._tasks = reasoning_gym.create_dataset(config.task, size=config.size, seed=seed, **config.options)
        except Exception as error:  # an unknown task, or options that it does not take
            raise DataError(f"{key}.task: reasoning-gym cannot make {config.task!r}: {error}") from error

    def __len__(self) -> int:
        return self._config.size

    def prompt(self, index: int) -> Prompt:
        """See `PromptSource`."""
        entry = json.loads(json.dumps(self._tasks[index], default=str))
        question = entry["question"] + self._config.suffix
        truth = {"task": self._config.task, "entry": entry}
        asked = make_prompt(index, question, truth, self._config.chat, self._config.system)
        return telling(asked, self._config.chat_template_kwargs)

    def score(self, answer: str, prompt: Prompt) -> float:
        """The task set's own score of an answer to one of its prompts."""
        return float(self._tasks.score_answer(answer=answer.strip(), entry=prompt.truth["entry"]))
