"""Answers that are given: whether the rows have them, and the tokenizer can tell them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.pipeline.config import Config
from penstock.pipeline.preflight.report import Report
from penstock.protocols.experience import Prompt
from penstock.services.data.answers import is_answer, not_answer, own_answer
from penstock.services.modeling.lengths import longest_sequence

if TYPE_CHECKING:  # it imports torch
    from penstock.services.turns.tokenizer import Tokenizer

TRAIN = "prompts.train"


def look_at_rows(config: Config, key: str, rows: Sequence[Prompt], report: Report) -> None:
    """Adds to ``report`` where the first ``rows`` of the data at ``key`` have no answers, and are to have some."""
    if rows and (key != TRAIN or config.rollout.given.answers):
        report.given[key] = list(rows)
        paired = _paired(config, key, rows)
        _add(key, [_lacks(key, prompt, paired) for prompt in rows], report, paired)
        if key != TRAIN and not paired:
            _add_unpaired(config, key, rows, report)
    elif rows and all(prompt.truth is None and prompt.answer is not None for prompt in rows):
        report.notes.append(
            f"{key}: its rows have an answer and no truth: an answer is learned as it is where rollout.given.answers "
            "says so, and a reward that compares does so with the truth; if that is meant, call it truth"
        )


def look_at_tokens(config: Config, tokenizer: Tokenizer, positions: int | None, report: Report, pictured: int) -> None:
    """Adds to ``report`` where the answers that these have cannot be made tokens of, for a model with so many
    ``positions`` (None: any number). Of rows with pictures so many are looked at."""
    from penstock.services.turns.given import given_trajectory

    room = longest_sequence(config.rollout.engine, positions)
    for key, rows in report.given.items():
        why, paired = [], _paired(config, key, rows)
        with_pictures = [prompt for prompt in rows if prompt.pictures]
        for prompt in rows:
            if _lacks(key, prompt, paired) or prompt in with_pictures[pictured:]:
                continue  # told of already, or one of many
            try:
                for rejected in (False, True)[: 1 + paired]:
                    given_trajectory(tokenizer, prompt, config.rollout.given.turns, 0, room, rejected=rejected)
                why.append("")
            except Exception as error:  # a template may raise anything
                why.append(f"row {prompt.index}: {error}")
        _add(key, why, report, paired)


def _paired(config: Config, key: str, rows: Sequence[Prompt]) -> bool:
    """Each of the ``rows`` at ``key`` gives an answer, and one that it is preferred to."""
    return config.rollout.given.rejected > 0 and (key == TRAIN or _some_rejected(rows))


def _add_unpaired(config: Config, key: str, rows: Sequence[Prompt], report: Report) -> None:
    """Adds to ``report`` where held-out ``rows`` bring pairs in a run that is not on such, or the other way round."""
    if _some_rejected(rows):
        report.notes.append(
            f"{key}: its rows have an answer that their own is preferred to (rejected_key), which counts where the "
            "run trains on such pairs (trainer.algorithm.preset=dpo): the loss is of their own answers alone"
        )
    elif config.rollout.given.rejected:
        report.notes.append(
            f"{key}: the run trains on pairs, and these rows bring no rejected answer: their loss is the mean of "
            f"-log p of their answers, and not DPO's; name its column as {key}.rejected_key"
        )


def _some_rejected(rows: Sequence[Prompt]) -> bool:
    return any(prompt.rejected is not None for prompt in rows)


def _lacks(key: str, prompt: Prompt, paired: bool) -> str:
    """Why a row has no answer, or, of a pair, no other one; empty: it has."""
    answer = own_answer(prompt)
    if is_answer(answer):
        lacks = _lacks_other(key, prompt, answer) if paired else ""
        return f"row {prompt.index}: {lacks}" if lacks else ""
    found = not_answer(answer)
    return f"row {prompt.index}: its answer is {found}, not text or messages: {key}.answer_key names its column"


def _who_wants(key: str, paired: bool) -> str:
    if key != TRAIN:
        return key
    return "rollout.given.rejected" if paired else "rollout.given.answers"


def _lacks_other(key: str, prompt: Prompt, answer: Any) -> str:
    if prompt.rejected == answer:
        return f"its two answers are the same: {key}.rejected_key names the column of another one than its own"
    if prompt.rejected is None:
        return f"it has no answer that its own is preferred to: {key}.rejected_key names its column"
    if not is_answer(prompt.rejected):
        return f"the answer that its own is preferred to is {not_answer(prompt.rejected)} ({key}.rejected_key)"
    return ""


def _add(key: str, why: list[str], report: Report, paired: bool = False) -> None:
    """``why`` not, of each row; empty where its answer can be given."""
    lacking = [words for words in why if words]
    if lacking:
        what = "a pair" if paired else "an answer"
        which = "none" if len(lacking) == len(why) else f"{len(lacking)}"
        words = f"{_who_wants(key, paired)}: of the first {len(why)} rows "
        words += f"of prompts.train {which} can" if key == TRAIN else f"{which} can"
        if len(lacking) == len(why):
            report.problems.append(f"{words} give {what}; {lacking[0]}")
        else:
            report.notes.append(f"{words}not give {what}, and will be dropped; {lacking[0]}")
