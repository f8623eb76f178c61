"""Pictures of one colour, and a task that takes eyes. Imports no torch: workers load it at their start."""

from __future__ import annotations

import io
from collections.abc import Sequence

from penstock.protocols.experience import PICTURE, Prompt
from penstock.protocols.turn import Turn

COLOURS = {"r": (220, 30, 30), "g": (30, 200, 40), "b": (30, 40, 230), "w": (240, 240, 240)}


def picture(colour: Sequence[int], size: tuple[int, int] = (32, 32)) -> bytes:
    """A PNG of one colour."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", size, tuple(colour)).save(file, "PNG")
    return file.getvalue()


def colours(rows: int = 64) -> list[Prompt]:
    """What colour is it? Nobody can tell who does not look."""
    names = list(COLOURS)
    return [
        Prompt(
            index=index,
            messages=[{"role": "user", "content": f"{PICTURE}is"}],
            truth=(name := names[index % len(names)]),
            pictures=(picture(COLOURS[name], (32 + 16 * (index % 3), 32)),),
        )
        for index in range(rows)
    ]


class Colour:
    """The same, as an environment that has the tasks itself: for a prompt that is a number and nothing else."""

    def reset(self, prompt: Prompt) -> Turn:
        """The task of that number."""
        row = colours(prompt.index + 1)[-1]
        self._name = row.truth
        return Turn(row.messages, pictures=row.pictures)

    def step(self, answer: str) -> Turn:
        """Right or wrong."""
        return Turn(reward=float(answer == self._name), done=True)
