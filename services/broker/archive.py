"""Trained steps on disk, a file each, with everything that a step was trained on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from penstock.protocols import wire
from penstock.protocols.experience import Group, as_bytes
from penstock.protocols.messages import Batch, TakenGroup
from penstock.protocols.packed_groups import unpack_group
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.files import remove_numbered, write_whole

Keep = Literal["all", "none"] | int


class Archive:
    """The folder ``archive`` of a run. A file that has its name is whole."""

    def __init__(self, folder: Path, keep: Keep) -> None:
        self._folder, self._keep = folder / "archive", keep

    @property
    def wanted(self) -> bool:
        """The config keeps one."""
        return self._keep != "none"

    def append(self, batch: Batch, digest: str) -> None:
        """Writes what ``batch.step`` was trained on and the digest that it yielded. May be repeated."""
        assert self.wanted
        self._folder.mkdir(parents=True, exist_ok=True)
        groups = [{"number": g.number, "experience": g.experience, "columns": g.columns} for g in batch.groups]
        row = {"step": batch.step, "seed": batch.seed, "max_lag": batch.max_lag, "digest": digest, "groups": groups}
        data = wire.pack(row)
        write_whole(self._path(batch.step), data, durable=True)
        if isinstance(self._keep, int):
            remove_numbered(self._folder, "step-", batch.step - self._keep)

    def _path(self, step: int) -> Path:
        return _file(self._folder, step)


STEP = re.compile(r"step-(\d+)\.msgpack")


def _file(archive: Path, step: int) -> Path:
    return archive / f"step-{step:06d}.msgpack"


class ArchiveError(SetupError):
    """A step's file that cannot be read; says which."""


def open_group(taken: TakenGroup) -> Group:
    """Its trajectories. Raises `ExperienceError` or `WireError` where they cannot be read."""
    return unpack_group(taken.experience.data)


def steps(folder: Path) -> list[int]:
    """Which steps of a run are in its archive, ascending."""
    found = (STEP.fullmatch(path.name) for path in (folder / "archive").glob("step-*.msgpack"))
    return sorted(int(match[1]) for match in found if match)


def read(folder: Path, first: int = 0, unread: Callable[[str], None] | None = None) -> Iterator[tuple[Batch, str]]:
    """The archived steps of a run from step ``first`` on, in order, each with the digest that it yielded; those that a
    run which keeps its last steps alone removes meanwhile are left out, and so are those whose file cannot be read,
    which ``unread`` is told. None: they raise `ArchiveError`."""
    for number in steps(folder):
        try:
            found = read_step(folder, number) if number >= first else None
        except ArchiveError as error:
            if unread is None:
                raise
            unread(f"{error}; it is left out")
            continue
        if found is not None:
            yield found


def read_step(folder: Path, number: int) -> tuple[Batch, str] | None:
    """Step ``number`` of a run's archive, and the digest that it yielded; None where it is not there (any more). Raises
    `ArchiveError` where its file cannot be read."""
    path = _file(folder / "archive", number)
    try:
        row = wire.unpack(path.read_bytes())
        groups = [
            TakenGroup(number=g["number"], experience=as_bytes(g["experience"].tobytes()), columns=dict(g["columns"]))
            for g in row["groups"]
        ]
        step, bound = row["step"], row["max_lag"]
        return Batch(step=step, seed=row["seed"], max_lag=bound, groups=groups, committed=step), row["digest"]
    except FileNotFoundError:
        return None
    except (wire.WireError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArchiveError(f"{path} cannot be read, as if cut short: {error}") from None
