"""Which deaths are worth another start."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import redis
import torch.distributed

from penstock.pipeline.run import crashes
from penstock.protocols.mailbox import DeadlineError
from penstock.services.runtime.errors import LibraryError
from penstock.services.runtime.plugins import UserCodeError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def test_the_same_failure_twice_at_one_step_is_the_end(folder: Path) -> None:
    assert not crashes.again(folder, "trainer", ValueError("12 at 0x7f12"), 4)
    assert crashes.again(folder, "trainer", ValueError("13 at 0x7fab"), 4)
    for times in range(2):  # an engine knows no step
        assert crashes.again(folder, "rollout-0", LibraryError(f"no memory for {times} blocks"), -1) == bool(times)
    assert not crashes.is_own(LibraryError("connection reset by peer"))
    assert not crashes.is_own(LibraryError("ValueError: Free memory on device cuda:0 (3/80 GiB) is less than desired"))
    assert not crashes.is_own(LibraryError("AssertionError: Error in memory profiling. Initial free memory 3, now 9"))


@pytest.mark.parametrize(
    ("name", "error", "step"),
    [
        ("trainer", ValueError("no such thing"), 5),
        ("trainer", ValueError("another thing"), 4),
        ("trainer", KeyError("no such thing"), 4),
        ("rollout-0", ValueError("no such thing"), 4),
    ],
)
def test_another_step_error_or_actor_is_another_failure(folder: Path, name: str, error: Exception, step: int) -> None:
    assert not crashes.again(folder, "trainer", ValueError("no such thing"), 4)
    assert not crashes.again(folder, name, error, step)


@pytest.mark.parametrize(
    "error",
    [
        DeadlineError("no answer from the broker"),
        ConnectionResetError("gone"),
        RuntimeError("Connection closed by peer"),
        RuntimeError("Timed out after 30 s"),
        RuntimeError("NCCL error: remote process exited or there was a network error (ncclRemoteError)"),
        redis.exceptions.BusyLoadingError("Redis is loading the dataset in memory"),
        torch.distributed.DistBackendError("unhandled system error"),
    ],
)
def test_what_others_did_never_counts(folder: Path, error: Exception) -> None:
    assert not any(crashes.again(folder, "trainer", error, 4) for _ in range(3))


def test_words_that_only_look_like_a_lost_connection_count(folder: Path) -> None:
    assert not crashes.again(folder, "trainer", ValueError("the graph is disconnected"), 4)
    assert crashes.again(folder, "trainer", ValueError("the graph is disconnected"), 4)


def test_a_users_own_timeout_counts(folder: Path) -> None:
    error = UserCodeError("trainer.algorithm.loss.function: mine:loss raised TimeoutError: timed out")
    assert not crashes.again(folder, "trainer", error, 4)
    assert crashes.again(folder, "trainer", error, 4)


def test_who_knows_no_step_must_fail_twice_in_a_short_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(crashes.time, "time", lambda: now[0])
    assert not crashes.again(folder, "broker", ValueError("row"), -1)
    now[0] += crashes.SOON_S + 1
    assert not crashes.again(folder, "broker", ValueError("row"), -1)
    now[0] += 5
    assert crashes.again(folder, "broker", ValueError("row"), -1)


def test_a_new_start_forgets(folder: Path) -> None:
    assert not crashes.again(folder, "trainer", ValueError("x"), 4)
    crashes.forget(folder)
    assert not crashes.again(folder, "trainer", ValueError("x"), 4)


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EROFS, "Read-only file system"), True),
        (RuntimeError("I/O error: No space left on device (os error 28)"), True),
        (OSError(errno.ENOENT, "No such file or directory"), False),
    ],
)
def test_a_full_disk_is_known_by_number_or_words(error: Exception, full: bool) -> None:
    assert crashes.disk_is_full(error) is full
