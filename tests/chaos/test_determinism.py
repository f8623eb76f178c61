"""``run.deterministic``: redo gives the same bits, and lag 0 is the plain synchronous loop, bit for bit."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.pipeline.config import Config, load
from penstock.pipeline.run.folder import run_key
from penstock.protocols.digests import Gmac
from penstock.protocols.experience import Trajectory
from penstock.services.data import open_source
from penstock.services.data.prompts import PromptStream
from penstock.services.learning.batch import TrainingBatch
from penstock.services.modeling.load import load_model
from penstock.services.modeling.logprobs import layout_of, logprobs
from penstock.services.modeling.packing import plan_rows
from penstock.services.modeling.parallel.world import World
from penstock.services.reward.functions.exact_match import exact_match
from penstock.services.rollout.engines.base import Request
from penstock.services.rollout.engines.torch.engine import TorchEngine
from penstock.services.runtime.failpoint import VARIABLE
from penstock.services.runtime.lines import read_lines
from penstock.services.trainer.learner import Learner
from penstock.services.turns.tokenizer import Tokenizer
from penstock.services.weights.sender.shard_exporter import ShardExporter
from tests import warm
from tests.chaos.harness import SMALL
from tests.e2e.runs import Run, check_promises

DETERMINISTIC = [*SMALL, "run.deterministic=true", "trainer.steps=12", "trainer.checkpoint.every=5"]


def digests(folder: Path) -> list[str]:
    """The digest of each version after 0, in order; every digest that a step ever had must be the same."""
    rows = read_lines(folder / "ledger.jsonl")
    found = {row["step"]: row["digest"] for row in rows}
    assert all(found[row["step"]] == row["digest"] for row in rows), "a redone step came out different"
    return [found[step] for step in sorted(found)]


@pytest.mark.slow
def test_a_trainer_killed_three_times_makes_the_versions_of_an_undisturbed_replay(tmp_path: Path) -> None:
    os.environ[VARIABLE], os.environ["PENSTOCK_KILL_LOG"] = "trained:3,committed:7,taken:9", str(tmp_path / "log")
    try:
        run = Run(tmp_path, DETERMINISTIC)
    finally:
        del os.environ[VARIABLE], os.environ["PENSTOCK_KILL_LOG"]
    summary = run.wait()
    check_promises(summary)
    assert summary["restarts"] == 3
    assert len(digests(run.folder)) == 12
    done = warm.run("replay", str(run.folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 of 12 versions have the recorded digest" in done.stdout
    one = warm.run("replay", str(run.folder), "--step", "11")
    assert "1 of 1 versions" in one.stdout
    ledger = warm.run("ledger", str(run.folder))
    assert "88-95" in ledger.stdout


@pytest.mark.slow
def test_lag_zero_is_the_plain_synchronous_loop(tmp_path: Path) -> None:
    run = Run(tmp_path, [*DETERMINISTIC, "gate.max_lag=0", "trainer.steps=6"])
    check_promises(run.wait())
    assert digests(run.folder) == synchronous(load(run.folder / "config.yaml"), run.folder)


def synchronous(config: Config, folder: Path) -> list[str]:
    """Generate, score, train, one after the other, in this process: no broker, no Redis, no ZeroMQ."""
    torch.set_num_threads(1)
    model_path, gmac = folder / "model", Gmac.of_run(run_key(folder))
    torch.use_deterministic_algorithms(True)
    cpu = torch.device("cpu")
    text = Tokenizer(str(model_path))
    model, reference = (load_model(str(model_path), "float32", cpu) for _ in range(2))
    learner = Learner(model, config.trainer, 1.0)
    reference.eval()
    prompts = PromptStream(open_source(config.prompts.train), config.run.seed, True, None)
    sampling = config.rollout.sampling.training()
    options = config.rollout.engine.model_copy(update={"max_sequences": sampling.n})
    engine = TorchEngine(options, model.config, "float32", text.stop_ids, lambda ids: "")
    found = []
    for step in range(config.trainer.steps):
        engine.swap(engine.prepare(dict(model.named_parameters())), step)
        trajectories: list[Trajectory] = []
        rewards: list[float] = []
        references: list[np.ndarray] = []
        numbers = range(step * config.gate.groups_per_step, (step + 1) * config.gate.groups_per_step)
        for number in numbers:
            prompt = prompts.draw(number)
            asked = text.encode(prompt)
            engine.submit(Request(number, config.run.seed, asked, sampling))
            done = []
            while engine.pending():
                done += engine.step()
            made = []
            for completion in sorted(done, key=lambda c: c.sample):
                size, new = len(asked), len(completion.tokens)
                made.append(
                    Trajectory(
                        np.r_[asked, completion.tokens],
                        np.r_[np.zeros(size), np.ones(new)].astype(np.uint8),
                        np.r_[np.zeros(size), np.minimum(completion.logprobs, 0)].astype(np.float32),
                        np.r_[np.full(size, -1), completion.versions].astype(np.int32),
                    )
                )
                rewards.append(exact_match(text.decode([completion.tokens.tolist()])[0], prompt.truth))
            columns = [np.zeros(len(t.tokens), np.float32) for t in made]
            budget = config.reference.tokens_per_batch
            for rows in plan_rows(made, [number] * len(made), budget, cpu, layout_of(reference)):
                with torch.inference_mode():
                    values = logprobs(reference, rows, 1.0).numpy()
                for k, index in enumerate(rows.index):
                    columns[index][1:] = values[k, : len(columns[index]) - 1]
            trajectories += made
            references += columns
        groups = np.repeat(np.array(numbers), sampling.n)
        learner.train(
            TrainingBatch(
                trajectories,
                groups,
                np.arange(len(groups)),
                {"reward": np.array(rewards, np.float32)},
                {"reference": references},
            )
        )
        source = ShardExporter(
            dict(model.named_parameters()), "float32", config.weights.bucket_bytes(), World(cpu), gmac
        )
        found.append(source.digest())
    torch.use_deterministic_algorithms(False)
    return found
