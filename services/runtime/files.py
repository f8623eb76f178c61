"""Files that are whole whenever they have their name."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, data: bytes | str, mode: int | None = None, durable: bool = False) -> None:
    """Writes ``data`` aside and renames it to ``path``: whoever reads sees the file before or this one. ``durable``:
    the disk has it when this returns. ``mode``: its permissions, from the start."""
    aside = path.with_name(f".{path.name}-{os.getpid()}")
    with aside.open("wb") as file:
        if mode is not None:
            os.fchmod(file.fileno(), mode)
        file.write(data.encode() if isinstance(data, str) else data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    aside.rename(path)
