"""How rows are cut over ranks."""

from __future__ import annotations


def rows_of(rows: int, rank: int, size: int) -> tuple[int, int]:
    """First row and number of rows of a rank's part, as `torch.chunk` cuts."""
    part = -(-rows // size)
    first = min(rank * part, rows)
    return first, min(part, rows - first)
