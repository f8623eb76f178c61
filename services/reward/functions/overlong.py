"""Soft punishment of overlong answers: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13."""


def overlong(response_tokens: int, longest: int, buffer: int) -> float:
    """0.0 for answers of up to ``longest - buffer`` tokens, then falling evenly to -1.0 at ``longest``, and beyond."""
    if not 0 < buffer <= longest:
        raise ValueError(f"overlong: buffer={buffer} is to be above 0, and at most longest={longest}")
    return -min(1.0, max(0.0, (response_tokens - (longest - buffer)) / buffer))
