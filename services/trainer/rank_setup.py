"""A rank of the trainer, made ready to train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from penstock.protocols.columns import ColumnTable
from penstock.protocols.digests import Gmac
from penstock.protocols.messages import Batch
from penstock.services.learning import checkpoint
from penstock.services.learning.batch import open_batch
from penstock.services.learning.shift import Shift
from penstock.services.modeling import determinism
from penstock.services.modeling.dtypes import DTYPES
from penstock.services.modeling.head import compute_head_in
from penstock.services.modeling.lengths import positions_of
from penstock.services.modeling.load import device_of, load_tokenizer, vocabulary_of
from penstock.services.modeling.lora import Adapter, is_adapters, plain_name
from penstock.services.modeling.parallel.start import load_trainable
from penstock.services.modeling.parallel.world import Shape, World, local_device
from penstock.services.modeling.routing import Replay, mixture_of
from penstock.services.modeling.sight import give_learners_sight
from penstock.services.modeling.version_weights import version_of
from penstock.services.modeling.whole_weights import AdapterBase
from penstock.services.runtime.actor import ActorContext
from penstock.services.trainer.adapter_off import with_reference
from penstock.services.trainer.advantage_config import SelfDistillationAdvantage
from penstock.services.trainer.canary import canary_tokens
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.held_out import HeldOut, HeldOutSettings, unpack_rows
from penstock.services.trainer.judgements import Judgements
from penstock.services.trainer.learner import Learner
from penstock.services.trainer.profiling import profiled
from penstock.services.trainer.self_teacher import SelfTeacher
from penstock.services.turns.tokenizer import Tokenizer
from penstock.services.weights.config import WeightsConfig
from penstock.services.weights.sender.shard_exporter import ShardExporter


@dataclass(frozen=True)
class TrainerSettings:
    """Everything a rank of the trainer needs to know beside its place."""

    trainer: TrainerConfig
    weights: WeightsConfig
    model_path: str
    dtype: str
    temperature: float
    run_key: str
    routing_replay: bool
    """Tokens go to the experts that an engine has sent them to."""
    checkpoints: Path
    columns: ColumnTable
    head_dtype: str | None = None
    """Of the logits; None: ``dtype``."""
    critic_warmup: int = 0
    """First steps in which a critic learns, and the policy does not."""
    reference_here: bool = False
    """The column `reference` is the policy's, without its adapter."""
    reference_every: int = 0
    """The reference reads checkpoints of versions that are multiples of it; 0: none."""
    mixtures: Path | None = None
    """Where it makes a model of each of them; None: of none."""
    deterministic: bool = False
    profiles: Path = Path("profiles")
    """Where traces of `TrainerConfig.profile_steps` go."""
    archive: Path = Path("archive")
    """Where it is said what became of the tokens of archived steps."""
    archived: Literal["all"] | int = 0
    """Of how many steps that is kept."""
    colocated: bool = False
    """Its devices are the rollouts' too."""
    turn_s: float = 0.0
    """How long these may take to give them up."""
    template: dict[str, Any] = field(default_factory=dict)
    """What the tokenizer's chat template is told beside the messages."""
    held_out: HeldOutSettings = field(default_factory=HeldOutSettings)
    """What the loss on held-out rows is of."""

    def held_out_rows(self, packed: bytes, model_config: Any) -> HeldOut:
        """Of rows, packed as `held_out.pack_rows` does, for a model of transformers' ``model_config``."""
        text, bounds = Tokenizer(self.model_path, self.template), (self.held_out.longest, positions_of(model_config))
        settings = replace(self.held_out, longest=min(filter(None, bounds), default=None))
        return HeldOut(settings, unpack_rows(packed), text, self.trainer.counted_steps)

    def canary(self, learner: Learner, tokenizer: Any) -> list[int]:
        """The sequence that every version is checked with: the same for a run's life, and on every rank."""
        return canary_tokens(tokenizer, learner.model.config, self.weights.canary_tokens)


@dataclass(frozen=True)
class Rank:
    """What a rank of the trainer begins with."""

    world: World
    learner: Learner
    """At the newest checkpoint, or at the start."""
    tokenizer: Any
    tail: list[dict[str, Any]]
    """The ledger's, as the checkpoint has it."""
    shift: Shift | None
    """Where its device is the rollouts' too: it is the trainer's turn."""


def make_rank(context: ActorContext, settings: TrainerSettings) -> Rank:
    """A rank, ready to train. Raises `TurnError` where its device is not given up."""
    torch.set_num_threads(context.threads)
    device = local_device(device_of(settings.trainer.device, "trainer.device"), "trainer")
    world = World.of_torchrun(device, Shape.of(settings.trainer))
    if settings.deterministic:
        determinism.pin(context.folder, world.named("trainer"), context.threads)
    shift: Shift | None = None
    if settings.colocated:
        shift = Shift(world, "trainer", context.folder, settings.trainer.device, settings.turn_s)
        shift.start()

    def make(path: str) -> Learner:
        trainer = settings.trainer
        model = load_policy(path, settings.model_path, world, settings.dtype, trainer)
        if trainer.sends_adapter:
            names = [plain_name(name) for name in version_of(model) if not is_adapters(name)]
            AdapterBase(settings.model_path, settings.dtype).check(names)
        compute_head_in(model, settings.head_dtype)
        if settings.routing_replay:
            Replay(model)
        teacher = self_teacher(trainer, settings.model_path, settings.template)
        if settings.deterministic:
            trainer = trainer.pinned()
        return Learner(model, trainer, settings.temperature or 1.0, world, teacher, settings.critic_warmup)

    learner, tail = checkpoint.open_learner(settings.checkpoints, world, settings.model_path, make)
    return Rank(world, learner, load_tokenizer(settings.model_path, settings.template), tail, shift)


def load_policy(path: str, start: str, world: World, dtype: str, config: TrainerConfig) -> Any:
    """The model to train, as it is at ``path``: where the run began, ``start``, or a checkpoint; which, with an
    adapter, has that alone."""
    lora, offload = config.lora, config.weights_on_host
    if lora is None:
        model = load_trainable(
            path, world, world.device, dtype, offload=offload, frozen=config.freeze, sight_learns=config.train_towers
        )
    else:
        adapter = Adapter.of(lora, Path(path) if path != start else None)
        model = load_trainable(start, world, world.device, dtype, adapter=adapter, offload=offload)
    give_learners_sight(model, start, dtype, world.device)  # a checkpoint may be gone when the first picture comes
    return model


def self_teacher(trainer: TrainerConfig, model_path: str, template: dict[str, Any]) -> SelfTeacher | None:
    """The policy as its own teacher, where it is one."""
    advantage = trainer.algorithm.advantage
    if not isinstance(advantage, SelfDistillationAdvantage):
        return None
    return SelfTeacher(advantage, Tokenizer(model_path, template))


def make_exporter(learner: Learner, settings: TrainerSettings) -> ShardExporter:
    """What this rank publishes."""
    gmac = Gmac.of_run(settings.run_key)
    dtype = settings.trainer.published_dtype(settings.dtype)
    own = {name: p.numel() for name, p in learner.model.named_parameters() if not is_adapters(name)}
    whole = sum(learner.world.of_stages(own).values())
    return ShardExporter(
        learner.published, dtype, settings.weights.bucket_bytes(learner.device.type), learner.world, gmac,
        loaded_bytes=DTYPES[settings.dtype].itemsize * whole,
    )  # fmt: skip


def train(
    learner: Learner, batch: Batch, settings: TrainerSettings, before_update: Callable[[], None]
) -> dict[str, float]:
    """One step on ``batch``, the same on every rank."""
    torch.manual_seed(batch.seed)  # for a loss of the user's own that draws numbers
    step = open_batch(batch, settings.columns, mixture_of(learner.model), vocabulary_of(learner.model))
    rank = learner.world.named("trainer")
    judgements = Judgements(step) if settings.archived else None
    if settings.reference_here:
        step = with_reference(learner, step, settings.temperature)
    with profiled(batch.step, settings.trainer.profile_steps, settings.profiles, rank, learner.device):
        metrics = learner.train(step, before_update, judgements)
    if judgements:
        judgements.write(settings.archive, batch.step, settings.archived, learner.world)
    return metrics
