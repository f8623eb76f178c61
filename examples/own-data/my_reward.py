"""A reward that gives part of the marks."""


def letters_in_place(response: str, truth: str) -> float:
    """The share of the letters that are right, in their place; one letter too many costs as much as a wrong one."""
    right = sum(a == b for a, b in zip(response, truth, strict=False))
    return right / max(len(response), len(truth))
