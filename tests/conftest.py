"""What many tests need: tiny models, trajectories, a real Redis."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import dataclasses
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import structlog

from penstock.protocols.experience import Group, Prompt, Trajectory
from penstock.services.runtime.user_folders import VARIABLE, look_in
from tests.e2e.runs import STARTED

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))

TORCH_ENGINE = "{type: torch, max_length: 128, max_sequences: 32, kv_on_update: recompute}"


@pytest.fixture(autouse=True)
def no_run_outlives_its_test() -> Iterator[None]:
    """A test that fails leaves its run behind, which would take a core until the end of all tests."""
    yield
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            process.kill()  # its actors end with it
            process.wait()


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Writes a module of a user's own where functions are looked for, ``(name.py, text)``; returns its file."""

    def write(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text)
        monkeypatch.setenv(VARIABLE, "")
        look_in(tmp_path)
        return tmp_path / name

    return write


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine", default=TORCH_ENGINE, help="rollout.engine of tests/engines, in YAML")
    parser.addoption("--rehearse", action="store_true", help="tests/gpu on the CPU, to see that the tests work")


TINY = {
    "vocab_size": 51,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}


def make_trajectory(
    random: np.random.Generator, prompt: np.ndarray, new: int, versions: tuple[int, ...] = (0,)
) -> Trajectory:
    """A trajectory of random tokens, sampled by ``versions`` in turn."""
    size = len(prompt)
    spread = np.sort(random.choice(np.array(versions), new))
    return Trajectory(
        tokens=np.concatenate([prompt, random.integers(2, 50, new)]).astype(np.int32),
        loss_mask=np.r_[np.zeros(size), np.ones(new)].astype(np.uint8),
        logprobs=np.r_[np.zeros(size), -random.random(new) * 3].astype(np.float32),
        versions=np.r_[np.full(size, -1), spread].astype(np.int32),
        text="".join(random.choice(list("abc"), new)),
    )


def with_candidates(random: np.random.Generator, trajectory: Trajectory, vocabulary: int = 51) -> Trajectory:
    """The same one, most of its sampled tokens chosen among a few."""
    counts = np.where(random.random(len(trajectory.tokens)) < 0.8, random.integers(1, 9, len(trajectory.tokens)), 0)
    counts = np.where(trajectory.loss_mask == 1, counts, 0).astype(np.int32)
    kept = []
    for token, count in zip(trajectory.tokens, counts, strict=True):
        others = random.permutation(np.setdiff1d(np.arange(vocabulary), [token]))[: max(0, count - 1)]
        kept.append(random.permutation(np.r_[token, others])[:count] if count else others[:0])
    ids = np.concatenate(kept).astype(np.int32)
    return dataclasses.replace(trajectory, candidate_counts=counts, candidate_ids=ids)


def make_group(random: np.random.Generator, number: int, n: int = 4, versions: tuple[int, ...] = (0,)) -> Group:
    """A group of ``n`` random trajectories of one prompt."""
    prompt = random.integers(2, 50, random.integers(2, 9)).astype(np.int32)
    trajectories = [make_trajectory(random, prompt, int(random.integers(1, 9)), versions) for _ in range(n)]
    return Group(number, Prompt(index=number, text="p", truth="t"), trajectories)


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    """A real Redis of its own."""
    from penstock.pipeline.run.redis_server import PrivateRedis

    server = PrivateRedis(tmp_path, "always")
    process = subprocess.Popen(server.command, stdout=subprocess.DEVNULL)
    socket = Path(server.url.removeprefix("unix://"))
    deadline = time.monotonic() + 10
    while not socket.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    yield server.url
    process.kill()
    process.wait()
    server.remove()
