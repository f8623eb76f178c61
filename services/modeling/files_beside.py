"""What lies beside a model's weights, and goes with them into whatever is made of it: the files of transformers'
processors, which say how pictures are read and which engines ask for; and the code that a model may have of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAMES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def read_beside(folder: Path, code: bool = False) -> dict[str, bytes]:
    """By path below ``folder``, the processors' files that it has, and, where they are wanted, those of its ``code``: a
    few KiB each."""
    found = {name: (folder / name).read_bytes() for name in NAMES if (folder / name).is_file()}
    if code:
        found |= {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.py"))}
    return found


def write_beside(files: Mapping[str, bytes], folder: Path) -> None:
    """Writes what `read_beside` gave into ``folder``."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def name_own_code(config: Any, files: Mapping[str, bytes]) -> None:
    """Has transformers' ``config``, which is to lie beside ``files``, name the code among them, where it named that of
    a repository on the hub (``ORG/MODEL--modeling.Class``)."""
    for head, named in (getattr(config, "auto_map", None) or {}).items():
        if isinstance(named, str):
            here = named.rpartition("--")[2]
            if f"{here.rpartition('.')[0].replace('.', '/')}.py" in files:
                config.auto_map[head] = here
