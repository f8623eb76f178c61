"""Files that are whole whenever they have their name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO


def write_whole(path: Path, data: bytes | str, mode: int | None = None, durable: bool = False) -> None:
    """Writes ``data`` aside and renames it to ``path``: whoever reads sees the file before or this one. ``durable``:
    the disk has it when this returns. ``mode``: its permissions, from the start."""
    aside = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with aside.open("wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(data.encode() if isinstance(data, str) else data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        aside.rename(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Until the disk has it: a file's bytes, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def let_read(folder: Path) -> None:
    """The safetensors files in ``folder`` get the rights that a new file has: the library makes them their owner's
    alone, and a server may be another user."""
    probe = folder / f".rights-{os.getpid()}"
    probe.touch()
    rights = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in folder.glob("*.safetensors"):
        path.chmod(rights)


def remove_numbered(folder: Path, before: str, number: int) -> None:
    """Removes the file called ``before``, ``number`` in six digits, ``.msgpack``; and those of lower numbers, which are
    there where more were kept until now."""
    (folder / f"{before}{number:06d}.msgpack").unlink(missing_ok=True)
    if number > 0 and (folder / f"{before}{number - 1:06d}.msgpack").exists():
        for path in folder.glob(f"{before}*.msgpack"):
            own = path.stem.removeprefix(before)
            if own.isdigit() and int(own) < number:
                path.unlink(missing_ok=True)


def open_lines(path: Path) -> TextIO:
    """To append lines to, each written at once. A last one that was cut short, by a full disk say, is ended first: or
    the next would be lost with it."""
    file = path.open("a+", buffering=1, encoding="utf-8")
    size = file.seek(0, os.SEEK_END)
    if size:
        with path.open("rb") as written:
            written.seek(-1, os.SEEK_END)
            if written.read(1) != b"\n":
                file.write("\n")
    return file
