"""`penstock replay`: redoes a run's steps from its archive, offline, and compares digests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from penstock.pipeline.config import Config, ConfigError, load
from penstock.pipeline.run.folder import model_path
from penstock.pipeline.tools.rollouts import check_archive
from penstock.protocols.messages import Batch
from penstock.services.runtime.gpus import EXACT, visible_gpus


@dataclass(frozen=True)
class Redone:
    """One step, done again."""

    step: int
    groups: int
    """That could be read, as in the run itself."""
    reward: float
    loss: float
    digest: str
    recorded: str

    @property
    def same(self) -> bool:
        """The version is, bit by bit, the one that the run had."""
        return self.digest == self.recorded


def redo(folder: Path, config: Config, only: int | None = None) -> Iterator[Redone]:
    """The archived steps of the run in ``folder``, done again from the model it started from; with ``only``, from the
    newest checkpoint at or before that step, and just as far. Raises `ConfigError` where the archive has none of it, or
    a gap, or not all columns of ``config``."""
    if config.run.deterministic and visible_gpus():
        for name, value in EXACT.items():  # before torch asks for them
            os.environ.setdefault(name, value)
    import torch

    from penstock.pipeline.run.folder import run_key
    from penstock.protocols.digests import Gmac
    from penstock.services.broker.archive import read
    from penstock.services.learning import checkpoint
    from penstock.services.learning.batch import open_batch
    from penstock.services.modeling import determinism
    from penstock.services.modeling.head import compute_head_in
    from penstock.services.modeling.load import device_of, vocabulary_of
    from penstock.services.modeling.parallel.world import World
    from penstock.services.modeling.routing import Replay, mixture_of
    from penstock.services.runtime import checkpoint_folders
    from penstock.services.trainer.adapter_off import with_reference
    from penstock.services.trainer.learner import Learner
    from penstock.services.trainer.rank_setup import load_policy, self_teacher
    from penstock.services.weights.sender.shard_exporter import ShardExporter

    check_archive(folder, only)
    if config.run.deterministic:
        determinism.pin(folder, "trainer", config.trainer.threads)
    torch.set_num_threads(config.trainer.threads)
    checkpoints = folder / "checkpoints"
    there = [] if only is None else [v for v in checkpoint_folders.versions(checkpoints) if v <= only]
    usable = [v for v in there if not checkpoint_folders.without_optimizer(checkpoints, v)]
    start = checkpoint_folders.path_of(checkpoints, usable[-1]) if usable else None
    begun = str(model_path(config, folder))
    world = World(device_of(config.trainer.device))
    trainer = config.trainer
    if config.run.deterministic:  # as the run itself did
        trainer = trainer.pinned()
    model = load_policy(str(start or begun), begun, world, config.model.dtype, trainer)
    compute_head_in(model, config.model.head_dtype)
    if config.rollout.sampling.routing_replay:
        Replay(model)
    teacher = self_teacher(trainer, begun, config.template)
    temperature = config.rollout.sampling.temperature
    learner = Learner(model, trainer, temperature, world, teacher, config.critic_warmup)
    if start:
        checkpoint.restore(learner, start)
    gmac = Gmac.of_run(run_key(folder))
    dtype = trainer.published_dtype(config.model.dtype)
    source = ShardExporter(learner.published, dtype, config.weights.bucket_bytes(world.device.type), world, gmac)
    for batch, recorded in read(folder, learner.version):
        if batch.step != learner.version:
            nearer = [v for v in there if v > learner.version]
            alone = f"; checkpoints of {nearer} have the model alone (trainer.checkpoint.keep_optimizer)" * bool(nearer)
            raise ConfigError(f"{folder}: step {learner.version} is not in the archive (replay.archive){alone}")
        _check_columns(batch, config)
        torch.manual_seed(batch.seed)
        step = open_batch(batch, config.columns, mixture_of(model), vocabulary_of(model))
        if config.reference_in_trainer:
            step = with_reference(learner, step, temperature)
        metrics = learner.train(step)
        digest = source.digest()
        groups = len(batch.groups) - step.unreadable
        if only is None or batch.step == only:
            yield Redone(batch.step, groups, metrics["reward"], metrics["loss"], digest, recorded)
        if batch.step == only:
            return


def _check_columns(batch: Batch, config: Config) -> None:
    """Raises `ConfigError` where a group of ``batch`` came without a column that ``config`` has."""
    # What some sources are asked for alone is looked at where a group is opened.
    wanted = {column.name for column in config.columns.scored if not column.sources}
    wanted |= {total.name for total in config.columns.trained_sums}
    for taken in batch.groups:
        if missing := sorted(wanted - taken.columns.keys()):
            raise ConfigError(
                f"step {batch.step} was trained without {missing[0]}, a column that the run's config has now; to redo "
                "it, take what asks for that out of config.yaml in a copy of the folder"
            )


def recompute(console: Console, folder: Path, only: int | None) -> bool:
    """Prints each step as it is redone; returns whether every digest was the recorded one."""
    config = load(folder / "config.yaml")
    ranks, same, total = config.trainer.ranks, 0, 0
    for step in redo(folder, config, only):
        total, same = total + 1, same + step.same
        differs = f"recorded {step.recorded}" if ranks > 1 else f"differs: recorded {step.recorded}"
        mark = "same bits" if step.same else differs
        console.print(
            f"step {step.step}: {step.groups} groups, reward {step.reward:.3f}, loss {step.loss:+.4f}, "
            f"version {step.step + 1} {step.digest} ({mark})",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    if ranks > 1 and same < total:
        console.print(
            f"{total} versions were redone by one process; the run's {ranks} ranks summed in another order, so that no "
            "digest is compared",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        return True
    promised = "" if config.run.deterministic else "only run.deterministic promises that, and "
    hint = "" if same == total else f"; {promised}all steps are redone with the config that the run has now"
    console.print(f"{same} of {total} versions have the recorded digest{hint}", highlight=False, soft_wrap=True)
    return same == total
