"""Text that others have written, such as a user's exception, for terminals, files and pages."""

from __future__ import annotations

import re

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def visible(text: str) -> str:
    """With control characters, but for line ends and tabs, as Python writes them: ``\\x1b`` moves no terminal."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def plain(text: str) -> str:
    """The same, in one line."""
    return visible(" ".join(text.split()))
