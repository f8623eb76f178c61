"""Files that a command writes where the user has said."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.pipeline.config import ConfigError
from penstock.pipeline.run.folder import make_folder


@contextmanager
def output(path: Path, key: str) -> Iterator[Path]:
    """The file to write instead of ``path``, which the option ``key`` has given: what it links to, since a file in one
    piece takes the place of a link. Its folder is made. Raises `ConfigError`, which names ``key``, where there is
    something else than a file, such as a device, or it cannot be written."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{key}: {path} is no file, and would be replaced by one; give another name")
    file = path.resolve() if path.is_symlink() else path
    make_folder(file.parent, key)
    try:
        yield file
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"{key}: cannot write {path}: {why}; choose another file") from None
