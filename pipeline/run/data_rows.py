"""How many rows a run's data had when it began: which prompt is drawn next follows from their number."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from penstock.services.runtime.files import write_whole

FILE = "rows.json"


def changed_rows(folder: Path, sizes: Mapping[str, int]) -> list[str]:
    """Notes on what has other ``sizes``, by its key, than when the run in ``folder`` was last started; and remembers
    them."""
    path = folder / FILE
    try:
        before: dict[str, int] = json.loads(path.read_text())
    except (OSError, ValueError):
        before = {}
    write_whole(path, json.dumps(before | dict(sizes)) + "\n")
    return [
        f"{key}: {size:,} rows, and {before[key]:,} when the run was last started: the rest of this epoch is drawn "
        "from all of them anew, so that some prompts come again, and some not at all"
        for key, size in sizes.items()
        if key.startswith("prompts.train") and before.get(key, size) != size
    ]
