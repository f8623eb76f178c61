"""Environments that show pictures, rightly or not. Imports no torch: workers load it at their start."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image

import penstock
from penstock.protocols.experience import PICTURE, Prompt
from tests import shown

RED, GREEN = (shown.picture(shown.COLOURS[name]) for name in "rg")


class Asking:
    """Asks in words of its own, and shows what it has to show, each turn."""

    def __init__(self, shows: str) -> None:
        self._shows, self._turn = shows, 0

    def reset(self, prompt: Prompt) -> Any:
        match self._shows:
            case "row":
                return f"see {PICTURE}"
            case "own":
                return penstock.Turn(f"see {PICTURE} or {PICTURE}", pictures=[RED, GREEN])
        return "see nothing"

    def step(self, answer: str) -> Any:
        self._turn += 1
        if self._shows == "nothing":
            return penstock.Turn("again ", reward=0.5)
        image = Image.open(io.BytesIO(GREEN))
        return penstock.Turn(
            "look " if self._turn == 1 else f"and {PICTURE}then {PICTURE}",
            0.5,
            pictures=([image] if self._turn == 1 else [RED, RED]),
        )


class AskingChat(Asking):
    """The same, as messages."""

    def reset(self, prompt: Prompt) -> Any:
        found = super().reset(prompt)
        words = found if isinstance(found, str) else found.observation
        pictures = () if isinstance(found, str) else found.pictures
        return penstock.Turn([{"role": "user", "content": words}], pictures=pictures)


class Endless(Asking):
    """Shows until there is no room, or says what only pictures are."""

    def reset(self, prompt: Prompt) -> Any:
        return f"see {PICTURE}"

    def step(self, answer: str) -> Any:
        if self._shows == "echo":
            return penstock.Turn("you said <|image_pad|>")
        return penstock.Turn("look ", 0.5, pictures=[GREEN])


class Confused:
    """Gives more than it has a place for."""

    def step(self, answer: str) -> Any:
        return penstock.Turn(f"see {PICTURE}", pictures=[RED, GREEN])


class Many:
    """Asks of more pictures than its task has."""

    def reset(self, prompt: Prompt) -> Any:
        return f"see {PICTURE} or {PICTURE}"

    def step(self, answer: str) -> Any:
        raise AssertionError("it has not begun")


class Late:
    """Shows something, and nobody was told."""

    def step(self, answer: str) -> Any:
        return penstock.Turn("see ", pictures=[RED])


class Broken:
    """Shows what is no picture."""

    def step(self, answer: str) -> Any:
        return penstock.Turn("see ", pictures=[RED, b"no picture"])
