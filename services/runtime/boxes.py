r"""Answers in LaTeX's boxes: ``\boxed{\frac{1}{2}}``."""

from __future__ import annotations

import re
from collections.abc import Iterator

_BOX, _BRACE = re.compile(r"\\boxed\s*\{"), re.compile(r"\\.|[{}]", re.DOTALL)


def boxes(text: str) -> Iterator[slice]:
    """Those that are closed and have something in them, not those inside another."""
    end = 0
    while opened := _BOX.search(text, end):
        depth = 1
        for brace in _BRACE.finditer(text, opened.end()):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if not depth:
                break
        else:
            return
        end = brace.end()
        if text[opened.end() : brace.start()].strip():
            yield slice(opened.start(), end)


def last_boxed(text: str) -> str | None:
    r"""What stands in the last box; None where there is none.

    >>> last_boxed(r"\boxed{0}, no: \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    box = None
    for box in boxes(text):  # noqa: B007 - the last of them
        pass
    return text[box].partition("{")[2][:-1].strip() if box else None
