"""An environment that does everything wrong that it can, in some second turns."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import penstock

_made = itertools.count()


class Moody:
    """Two turns; the answers do not matter. ``folder`` remembers what happens once in a run."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def reset(self, prompt: penstock.Prompt) -> None:
        self._turn, self._mood = 0, next(_made) % 40

    def step(self, answer: str) -> Any:
        self._turn += 1
        if self._turn < 2:
            return penstock.Turn("sort ab=", reward=0.25 * ("a" in answer))
        match self._mood:
            case 5:
                raise ValueError("not in the mood")
            case 10:
                return [1]
            case 15 if self._first("hang"):
                time.sleep(100)
            case 20 if self._first("crash"):
                os._exit(3)
        return penstock.Turn(reward=float(len(answer) % 2), done=True)

    def _first(self, what: str) -> bool:
        try:
            (self._folder / what).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
