"""Which way a version goes, by where trainer and rollout are."""

from __future__ import annotations

import pytest

from penstock.protocols import messages as m
from penstock.services.weights.sender.ways import Ways

HERE, THERE = "pid:[1]", "pid:[2]"
NONCE = "nonce"


@pytest.mark.parametrize(
    ("trainer", "workers", "nonce", "wanted"),
    [
        ("", [""], NONCE, "shm"),
        ("", [""], "", "gloo"),
        (f"A@{HERE}", [f"B@{HERE}", f"C@{HERE}"], NONCE, "nccl"),
        (f"A@{HERE}", [f"A@{HERE}"], NONCE, "shm"),
        (f"A@{HERE}", [f"A@{HERE}"], "", "cuda_ipc"),
        (f"A@{HERE}", [f"B@{THERE}", f"C@{THERE}"], NONCE, "shm"),
        (f"A@{HERE}", [f"B@{THERE}"], "", "nccl"),
        (f"A@{HERE}", [f"A@{THERE}"], "", "gloo"),
        (f"A@{HERE}", [""], NONCE, "shm"),
        (f"A@{HERE} B@{HERE}", [f"C@{HERE}"], NONCE, "nccl"),
        (f"A@{HERE} B@{HERE}", [f"B@{HERE}"], NONCE, "shm"),
        (f"A@{HERE} B@{HERE}", [f"B@{HERE}"], "", "gloo"),
    ],
    ids=["CPUs of a host", "CPUs apart", "GPUs of a host", "one GPU", "one GPU, memory apart", "containers of a host",
         "GPUs of two hosts", "a GPU that NCCL cannot take twice", "a CPU beside a GPU", "two ranks",
         "beside the second rank", "beside the second rank, memory apart"],
)  # fmt: skip
def test_the_best_way_is_taken(trainer: str, workers: list[str], nonce: str, wanted: str) -> None:
    """Between containers of a host NCCL has sockets alone, and memory is shared."""
    places = [m.Place(nonce=nonce, host="h", gpu=gpu) for gpu in workers]
    ways = Ways("auto", NONCE, trainer.split(" "))
    assert ways.choose(m.Reach(layout="l", places=places, receiver="rollout-0#1"), []) == wanted


@pytest.mark.parametrize(("nonce", "only", "wanted"), [(NONCE, None, True), ("", None, False), (NONCE, "nccl", False)])
def test_who_was_late_reads_a_version_from_memory_where_nobody_says_otherwise(
    nonce: str, only: str | None, wanted: bool
) -> None:
    """Whatever the next ones come by: NCCL's members would ask for gigabytes over ZeroMQ."""
    ways = Ways("auto", NONCE, [f"A@{HERE}"])
    places = [m.Place(nonce=nonce, host="h", gpu=f"B@{HERE}")]
    reach = m.Reach(layout="l", places=places, receiver="rollout-0#1", only=only)
    assert ways.choose(reach, []) == "nccl"
    ways.places["rollout-0#1"] = places
    assert ways.share_memory("rollout-0#1") == wanted
    ways.keep([])
    assert not ways.share_memory("rollout-0#1")
