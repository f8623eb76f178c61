"""How many words a short answer shares with the truth: Rajpurkar et al. 2016 (SQuAD), arXiv:1606.05250."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

from penstock.services.reward.truth import as_text
from penstock.services.turns.tool_calls import answered

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def f1(response: str, truth: Any, pattern: str | None = None, exact: bool = False) -> float:
    """The harmonic mean of precision and recall of the response's words, from 0.0 to 1.0: capitals, punctuation and
    English articles do not count, nor do thoughts. ``truth`` is text, or a list of good answers, of which the best
    counts. ``pattern``: the last of it in the response is the answer, or its first group is, e.g.
    ``<answer>(.*?)</answer>``; 0.0 where there is none. ``exact``: 1.0 where all words agree in their order, else
    0.0."""
    goods = truth if isinstance(truth, Sequence) and not isinstance(truth, str) else [truth]
    if not goods:
        raise ValueError("the truth is an empty list: there is no good answer")
    response = answered(response)
    wanted = [_words(as_text(good)) for good in goods]  # first, so that a truth that is no text is told of anyway
    if pattern is not None:
        found = list(re.finditer(pattern, response, re.DOTALL))
        if not found:
            return 0.0
        response = found[-1].group(1 if found[-1].re.groups else 0) or ""
    said = _words(response)
    return max(_exact(said, good) if exact else _shared(said, good) for good in wanted)


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _exact(said: list[str], wanted: list[str]) -> float:
    return float(said == wanted)


def _shared(said: list[str], wanted: list[str]) -> float:
    if not said or not wanted:
        return float(said == wanted)
    common = (Counter(said) & Counter(wanted)).total()
    return 2 * common / (len(said) + len(wanted))
