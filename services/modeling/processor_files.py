"""What a model of words and pictures is told of pictures: transformers' processor files, which engines ask for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

NAMES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def read_processor(folder: Path) -> dict[str, bytes]:
    """By name, those that ``folder`` has: a few KiB each."""
    return {name: (folder / name).read_bytes() for name in NAMES if (folder / name).is_file()}


def write_processor(files: Mapping[str, bytes], folder: Path) -> None:
    """Writes what `read_processor` gave into ``folder``."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
