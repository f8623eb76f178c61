"""Punishment of answers that say the same again and again: Yeo et al. 2025, arXiv:2502.03373."""


def repetition(response: str, words: int = 3, penalty: float = 1.0) -> float:
    """0.0 where no sequence of so many ``words`` comes twice, then falling to ``-penalty`` with the share of the
    sequences that were there before; words are what spaces separate, whatever their case."""
    if words < 1:
        raise ValueError(f"repetition: words={words} is to be 1 or more")
    said = response.lower().split()
    sequences = [tuple(said[start : start + words]) for start in range(len(said) - words + 1)]
    return -penalty * (1 - len(set(sequences)) / len(sequences)) if sequences else 0.0
