"""What a name that nobody knows may have meant, in words for an error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(name: str, known: Iterable[str]) -> str | None:
    """The one of ``known`` that is spelled most like ``name``, or else the only one that goes on from it; None where
    none is spelled nearly so."""
    known = list(known)
    longer = [each for each in known if each.startswith(f"{name}_")]
    if name and len(longer) == 1:
        return longer[0]
    return next(iter(difflib.get_close_matches(name, known, 1)), None)


def nearest(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """``did you mean 'max_lag'?``, or ``otherwise``; where that is not given, all that there is."""
    known = list(known)
    if near := closest(name, known):
        return f"did you mean {near!r}?"
    return f"there are {', '.join(known) or 'none'}" if otherwise is None else otherwise


def hint(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'max_lag'?``, behind a sentence; empty where nothing is near."""
    said = nearest(name, known, "")
    return said and f"; {said}"
