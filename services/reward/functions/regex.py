"""1 where the response has a form: tags for thoughts, a line with the answer, JSON braces."""

import re
from functools import lru_cache


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


def regex(response: str, pattern: str, whole: bool = False) -> float:
    """1.0 where ``pattern``, a regular expression of Python's whose dot takes line ends too, is found in the response;
    with ``whole`` where it is all of it, but for spaces at both ends; else 0.0."""
    found = _compiled(pattern).fullmatch(response.strip()) if whole else _compiled(pattern).search(response)
    return float(found is not None)
