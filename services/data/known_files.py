"""What was found out about files, kept beside the cache of ``datasets`` for as long as they do not change."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from penstock.services.runtime.files import write_whole


class KnownFile:
    """One of them: by its path, its size and when it was written."""

    def __init__(self, file: Path) -> None:
        import datasets

        about = file.stat()
        said = json.dumps([str(file.resolve()), about.st_size, about.st_mtime_ns])
        name = f"{hashlib.sha256(said.encode()).hexdigest()}.json"
        self._path = Path(datasets.config.HF_DATASETS_CACHE) / "penstock" / name

    def read(self) -> Any:
        """What was kept of it as it is now; None: nothing."""
        try:
            return json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def keep(self, found: Any) -> None:
        """``found``, values of JSON, where that can be written."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps(found))
        except OSError:  # it is found out again
            return
