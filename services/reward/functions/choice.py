"""1 where the response chooses the right letter of a question with several answers: MMLU, GPQA and their like."""

import re
from typing import Any

from penstock.services.reward.truth import as_text
from penstock.services.turns.tool_calls import answered

_SIGNS = re.compile(r"\\[()]|[$*]|</?\w{1,30}>")
"""What may stand around a letter: signs of formulas, stars, tags."""
_LETTER = r"[(\[]?([A-Z])[)\].:]?"
_FORMS = (
    re.compile(r"\\boxed\{\s*+(?:\\[a-z]{2,8}\{\s*+)?+" + _LETTER + r"\s*+\}"),
    re.compile(r"(?i:answer)(?i:\s++is(?![\w']))?+[\s:=]*+" + _LETTER + r"(?![\w'])"),
    re.compile(r"(?i:choice|option)(?i:\s++is(?![\w']))?+[\s:=]*+" + _LETTER + r"(?![\w'])"),
    re.compile(r"(?<![\w'])(?:(?<=[(\[])[A-Z](?=[)\]])|[A-Z](?=[).:,]|[ \t]*+$))", re.MULTILINE),  # and no article
)
"""From the plainest to the least plain: the last one of the first form that there is counts."""


def choice(response: str, truth: Any) -> float:
    """1.0 where the letter that the response chooses is the truth's: the last in a box, else the last behind "answer",
    else behind "choice" or "option", else the last capital that stands alone, in brackets, before a sign, or at the end
    of a line; what was only thought chooses nothing. ``truth``: a letter, or a number from 0 on."""
    said = as_text(truth).strip()
    wanted = chr(ord("A") + int(said)) if said.isdecimal() and int(said) < 26 else said.strip("()[].: ").upper()
    if not re.fullmatch("[A-Z]", wanted):
        raise ValueError(f"the truth is no letter: {said[:80]!r}; set truth_key to the column that has it")
    plain = _SIGNS.sub(" ", answered(response))
    for form in _FORMS:
        if found := form.findall(plain):
            return float(found[-1] == wanted)
    return 0.0
