"""Limits of control groups are those of the machine."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from penstock.services.runtime import allowance

GIB = 1 << 30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of control groups, in place of the machine's."""
    monkeypatch.setattr(allowance, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(allowance, "OWN", tmp_path / "own")
    monkeypatch.setattr(allowance.os, "sched_getaffinity", lambda _: set(range(192)))
    plenty = psutil.virtual_memory()._replace(total=1000 * GIB, available=900 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: plenty)
    return tmp_path


def make(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_without_limits_it_is_the_machine(groups: Path) -> None:
    assert allowance.cores() == 192 and allowance.memory() == (1000 * GIB, 900 * GIB)
    (groups / "own").write_text("0::/job\n")
    make(groups / "cgroup" / "job", cpu__max="max 100000\n", memory__max="max\n", memory__current="5\n")
    assert allowance.cores() == 192 and allowance.memory() == (1000 * GIB, 900 * GIB)


def test_the_least_of_the_groups_counts(groups: Path) -> None:
    (groups / "own").write_text("0::/slurm/job_7/step_0\n")
    make(groups / "cgroup", cpu__max="6400000 100000\n")
    job = groups / "cgroup" / "slurm" / "job_7"
    make(job, cpu__max="650000 100000\n", memory__max=f"{28 * GIB}\n", memory__current=f"{10 * GIB}\n")
    make(job, memory__stat=f"anon 5\ninactive_file {4 * GIB}\n")
    make(job / "step_0", memory__max=f"{40 * GIB}\n")
    assert allowance.cores() == 7 and allowance.memory() == (28 * GIB, 22 * GIB)


def test_the_older_version_is_read_too(groups: Path) -> None:
    (groups / "own").write_text("5:cpu,cpuacct:/docker/a\n4:memory:/docker/a\n0::/\n")
    make(groups / "cgroup" / "cpu" / "docker" / "a", cpu__cfs_quota_us="200000\n", cpu__cfs_period_us="100000\n")
    inside = groups / "cgroup" / "memory"  # of a container, which sees its own group at the top
    make(inside, memory__limit_in_bytes=f"{16 * GIB}\n", memory__usage_in_bytes=f"{GIB}\n")
    assert allowance.cores() == 2 and allowance.memory() == (16 * GIB, 15 * GIB)
