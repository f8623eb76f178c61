"""Pairs of answers to `sort hgbaf=`: the sorted letters, and the same ones with two in each other's place."""

import random
from collections.abc import Sequence

import penstock


def pairs(size: int = 4000, seed: int = 0) -> Sequence[penstock.Prompt]:
    """Rows, of which each has an ``answer`` that is preferred, and one that is ``rejected``."""
    draw, found = random.Random(seed), []
    for index in range(size):
        letters = draw.sample("abcdefghij", draw.randint(4, 8))
        right, wrong = "".join(sorted(letters)), sorted(letters)
        first, second = draw.sample(range(len(wrong)), 2)
        wrong[first], wrong[second] = wrong[second], wrong[first]
        question = f"sort {''.join(letters)}="
        found.append(penstock.Prompt(index=index, text=question, truth=right, answer=right, rejected="".join(wrong)))
    return found
