"""What a model's folder says of how to sample from it: transformers' ``generation_config.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write_generation_config(told: Any, folder: Path) -> None:
    """Writes ``told``, transformers' GenerationConfig, into ``folder``. Its own ``save_pretrained`` refuses what
    ``from_pretrained`` takes from many a model's files: a temperature without ``do_sample``."""
    told.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
