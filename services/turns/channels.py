"""Answers in channels, as gpt-oss (https://cookbook.openai.com/articles/openai-harmony) and Gemma 4 write them: which
of them are thoughts is said by special tokens, which no decoded text shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.services.turns.tool_calls import THINK, UNTHINK

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
ENDS = (END, "<|return|>", "<|call|>")
OPEN, CLOSE = "<|channel>", "<channel|>"
"""Gemma's: what stands between is a channel's name, a line's end, and what it says."""
THOUGHT, ANSWER = "analysis", "final"


class Channels:
    """Of a tokenizer that has them."""

    def __init__(self, special: Mapping[int, str], decode: Callable[[Sequence[int]], str]) -> None:
        """``special``: its special tokens by their ids; ``decode``: the text of tokens without these."""
        self._special, self._decode = special, decode

    @staticmethod
    def of(special: Mapping[int, str], decode: Callable[[Sequence[int]], str]) -> Channels | None:
        """None where the tokenizer has none."""
        marks = set(special.values())
        if {OPEN, CLOSE} <= marks:
            return OpenedChannels(special, decode)
        return Channels(special, decode) if {START, CHANNEL, MESSAGE, END} <= marks else None

    def text(self, row: Sequence[int]) -> str:
        """The text of ``row``: thoughts stand between ``<think>`` and ``</think>``, as other models write them, and of
        an answer there is what it says; all else is as it is decoded."""
        found: list[str] = []
        for part in self._messages(row):
            marks = [self._special.get(token, "") for token in part]
            if CHANNEL not in marks or MESSAGE not in marks:
                found.append(self._decode(part))
                continue
            channel, message = marks.index(CHANNEL), marks.index(MESSAGE)
            named = next(place for place in range(channel + 1, message + 1) if marks[place])  # a format may follow
            name = self._decode(part[channel + 1 : named]).split()
            body = self._decode(part[message + 1 :])
            if name[:1] == [THOUGHT]:
                found.append(f"{THINK}{body}{UNTHINK if marks[-1] in ENDS else ''}")
            else:
                found.append(body if name[:1] == [ANSWER] else self._decode(part[channel:]))
        return "".join(found)

    def _messages(self, row: Sequence[int]) -> list[list[int]]:
        """Each ends with the token that ends it, or where another begins."""
        parts: list[list[int]] = [[]]
        for token in row:
            mark = self._special.get(token, "")
            if mark == START and parts[-1]:
                parts.append([])
            parts[-1].append(token)
            if mark in ENDS:
                parts.append([])
        return [part for part in parts if part]


class OpenedChannels(Channels):
    """Gemma's."""

    def text(self, row: Sequence[int]) -> str:
        """See `Channels.text`."""
        found, begun, opened = list[str](), 0, False
        marks = [self._special.get(token, "") for token in row]
        for place, mark in [*enumerate(marks), (len(row), "")]:
            if place < len(row) and mark != (CLOSE if opened else OPEN):
                continue
            said = self._decode(row[begun:place])
            found.append(f"{THINK}{said.partition(chr(10))[2]}{UNTHINK if mark else ''}" if opened else said)
            begun, opened = place + 1, not opened
        return "".join(found)
