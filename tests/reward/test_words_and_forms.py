"""Rewards for what an answer looks like, and for the words that it has."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from penstock.services.reward.functions.choice import choice
from penstock.services.reward.functions.f1 import f1
from penstock.services.reward.functions.regex import regex
from penstock.services.reward.functions.repetition import repetition

THOUGHT = r"<think>.*?</think>\s*<answer>.*?</answer>"


@pytest.mark.parametrize(
    ("response", "pattern", "whole", "reward"),
    [
        ("<think>\n3 + 4\n</think>\n<answer>7</answer>\n", THOUGHT, True, 1.0),
        ("So: <think>3 + 4</think><answer>7</answer>", THOUGHT, True, 0.0),
        ("So: <think>3 + 4</think><answer>7</answer>", THOUGHT, False, 1.0),
        ("<answer>7</answer>", THOUGHT, False, 0.0),
    ],
)
def test_a_form_is_found_or_is_all_of_it(response: str, pattern: str, whole: bool, reward: float) -> None:
    assert regex(response, pattern, whole) == reward


def test_a_pattern_that_is_none_is_an_error() -> None:
    with pytest.raises(re.error):
        regex("a", "(")


@pytest.mark.parametrize(
    ("response", "truth", "reward"),
    [
        ("It cannot be A or C. The answer is (B).", "B", 1.0),
        ("Answer: B", "b", 1.0),
        (r"A is wrong, so \boxed{\text{D}}.", "D", 1.0),
        (r"\boxed{A}, no: \boxed{(C)}", "C", 1.0),
        ("The answer is **B**, and A is not.", "B", 1.0),
        ("B", 1, 1.0),
        ("C", "(C)", 1.0),
        ("A. Because the sun is hot.", "A", 1.0),
        ("The answer is Berlin", "B", 0.0),
        ("I'd say A", "A", 1.0),
        ("<think>A or B?</think><answer>B</answer>", "B", 1.0),
        ("Answer: $B$", "B", 1.0),
        (r"The answer is: \(B\)", "B", 1.0),
        (r"\boxed{\mathbf{B}}", "B", 1.0),
        ("Answer: B. Option A is wrong.", "B", 1.0),
        ("I think it is (D), since A cat has four legs", "D", 1.0),
        ("C, since that is what I think", "C", 1.0),
        ("no idea", "A", 0.0),
        ("So the answer is (C)? No.</think>(B)", "B", 1.0),
        ("<think>The answer is B, or", "B", 0.0),
    ],
)
def test_the_letter_that_is_chosen(response: str, truth: Any, reward: float) -> None:
    assert choice(response, truth) == reward


@pytest.mark.parametrize("begun", ["answer", "the answer is", "option", r"\boxed{", r"\boxed{\text{", "A", "x ("])
def test_whatever_is_said_is_read_in_no_time(begun: str) -> None:
    started = time.monotonic()
    for filler in (" ", "\n", "$", "(", "A ", f"{begun} "):
        choice(begun + filler * 50_000, "B")
    assert time.monotonic() - started < 5.0


def test_a_truth_that_is_no_letter_is_an_error() -> None:
    for truth in ("Berlin", "27", ""):
        with pytest.raises(ValueError, match="the truth is no letter"):
            choice("A", truth)


@pytest.mark.parametrize(
    ("response", "truth", "reward"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1.0),
        ("in Paris, France", "Paris", 0.5),
        ("Rome", "Paris", 0.0),
        ("a cat a cat", "cat", 2 / 3),
        ("NYC", ["New York City", "nyc"], 1.0),
        ("", "x", 0.0),
        (42, 42, 1.0),
        ("<think>Rome? No, it is Paris.</think>\n\nParis", "Paris", 1.0),
        ("Rome? It is Paris.</think>Rome", "Paris", 0.0),
    ],
)
def test_shared_words(response: Any, truth: Any, reward: float) -> None:
    assert f1(str(response), truth) == pytest.approx(reward)


def test_the_answer_may_be_a_part_of_the_response_and_must_agree_in_full_where_that_is_asked() -> None:
    said, part = "Paris? <answer>Rome</answer> no, <answer>The Paris</answer>", "<answer>(.*?)</answer>"
    assert f1(said, "Paris", pattern=part) == 1.0 and f1("Paris", "Paris", pattern=part) == 0.0
    assert f1("in Paris", "Paris", exact=True) == 0.0 and f1("the paris.", "Paris", exact=True) == 1.0
    with pytest.raises(ValueError, match="no good answer"):
        f1("x", [])
    with pytest.raises(TypeError, match="set truth_key to what has the answer, one of target"):
        f1("no part that could be one", {"target": ["Paris"]}, pattern=part)


def test_what_is_said_again_is_punished_by_its_share() -> None:
    assert repetition("one two three four", 2) == 0.0 == repetition("one", 2)
    assert repetition("to be to be to be", 2) == pytest.approx(-3 / 5), "five pairs, two of them different"
    assert repetition("no No no no", 1, 0.5) == pytest.approx(-0.5 * 3 / 4)
    with pytest.raises(ValueError, match="words=0"):
        repetition("a", 0)
