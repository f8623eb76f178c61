"""Config sections that every learner has."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from penstock.services.learning.adapter_config import AdapterConfig
from penstock.services.learning.optimizer_config import OptimizerConfig
from penstock.services.runtime.command_words import words_of
from penstock.services.runtime.settings import Section

GRADIENT_SHARE = 0.2
"""Of the memory that is free before the first step: so much may whole gradients take (`sum_gradients`: ``auto``)."""


_NAMED = re.compile(r"(?<!\$)\{(\w+)\}")
THEN = "hf upload me/my-model {folder}"
"""What a checkpoint's command may be."""


class CheckpointConfig(Section):
    """Checkpoints in the transformers layout, with the trainer's own state beside them."""

    every: int = Field(50, ge=1)
    """Steps between checkpoints; the last step always has one."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints that are kept."""
    keep_every: int | None = Field(None, ge=1)
    """Checkpoints of multiples of so many steps stay for ever, e.g. ``500``, a multiple of `every`; null: none does."""
    keep_best: bool = False
    """Keep the one with the best evaluation so far too (`prompts.best_by`); needs `prompts.eval_every`, a multiple of
    `every`."""
    keep_optimizer: Literal["all", "newest"] = "all"
    """Which checkpoints keep the optimizer's state, two thirds of each (AdamW): ``all``; or ``newest``, the newest
    `keep` alone: what stays beyond these (`keep_every`, `keep_best`) can be evaluated, merged and begun from, but a
    run cannot be rolled back to it."""
    then: str | tuple[str, ...] | None = None
    """A command for each checkpoint, to upload it, say, e.g. ``hf upload me/my-model {folder} step-{step} --exclude
    "trainer/*"``, beside the next steps, one after another, without a shell; ``{folder}`` is the checkpoint's, and
    ``{step}`` its number. The run ends once it is done with the last one. One that fails is tried three times, 30 s
    apart, and again for those that are still there when the run is resumed; what it says is in the run's logs."""
    then_s: float = Field(3600.0, gt=0)
    """Seconds that `then` may take for one checkpoint, e.g. ``7200``."""

    @field_validator("then")
    @classmethod
    def _has_words(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        for word in words_of(value, THEN) if value is not None else ():
            for name in _NAMED.findall(word):
                if name not in ("folder", "step"):
                    raise ValueError(f"there is no {{{name}}}; there are {{folder}} and {{step}}")
        return value

    @model_validator(mode="after")
    def _are_made(self) -> CheckpointConfig:
        if self.keep_every and self.keep_every % self.every:
            raise ValueError(
                f"keep_every={self.keep_every} is no multiple of every={self.every}: what stays must be saved first"
            )
        return self

    @property
    def then_words(self) -> list[str]:
        """Those of `then`; none: there is no such command."""
        return words_of(self.then, THEN) if self.then is not None else []

    def kept(self, steps: int) -> tuple[int, int]:
        """Checkpoints that there are at most within so many steps, with the one that is being written: those that have
        the optimizer's state, and those that have lost it."""
        older = self.keep_best + (steps // self.keep_every if self.keep_every else 0)
        return (self.keep + 1, older) if self.keep_optimizer == "newest" else (self.keep + 1 + older, 0)


class LearnerConfig(Section):
    """What all learners have."""

    ranks: int = Field(1, ge=1)
    """Processes that share the model by FSDP2, under torchrun; on GPUs one each."""
    nodes: int = Field(1, ge=1)
    """Machines that `ranks` are dealt over, e.g. ``2`` with 16 ranks: eight on each. They join the run by `penstock
    join`, as `run.elsewhere` must say, or by `penstock launch`. See docs/clusters.md."""
    replicas: int = Field(1, ge=1)
    """Copies of the cut model (HSDP), e.g. ``2``: of 16 `ranks` each copy is cut over 8, and gradients are summed
    between the copies; for ranks on several machines, so that parameters are gathered within one."""
    sequence_parallel: int = Field(1, ge=1)
    """Ranks that share each row's tokens (Ulysses), e.g. ``4``: activations take a quarter. It must divide the heads of
    attention."""
    tensor_parallel: int = Field(1, ge=1)
    """Ranks that share each layer's matrices, e.g. ``2``: what is gathered of a layer is half as large. It must divide
    the heads of keys and values."""
    expert_parallel: int = Field(1, ge=1)
    """Ranks that share the experts of each layer, in a mixture of experts, e.g. ``8``: tokens travel to the experts
    that they chose, and what is gathered of a layer's experts is an eighth. It must divide the experts, and `ranks` /
    `replicas` / `tensor_parallel` / `pipeline_parallel`."""
    pipeline_parallel: int = Field(1, ge=1)
    """Stages that the layers are dealt over, e.g. ``2``: each on `ranks` of its own, which hand every micro-batch on to
    the next; all that is cut over ranks is cut over those of one stage. For ranks on several machines: between stages
    hidden states travel alone. A step wants several micro-batches, or stages wait for each other."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW, Muon, or another one: how the weights are changed."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the model is saved, in transformers' layout, with the learner's own state beside it. Groups are kept until
    all learners have a checkpoint that covers them."""
    epochs: int = Field(1, ge=1)
    """How often a step's groups are learned from, e.g. ``2``: PPO's epochs. A token's lag counts steps, not epochs:
    from the second one on the policy has moved on from what sampled, however small `gate.max_lag`; only the loss's clip
    bounds that."""
    mini_batches: int = Field(1, ge=1)
    """Updates in an epoch, e.g. ``4``: the step's groups are dealt into so many parts, each an optimizer step."""
    tokens_per_micro_batch: int = Field(8192, ge=1)
    """Tokens of one forward and backward pass, padding included; fewer need less memory, the result is the same."""
    tokens_per_mlp: int | None = Field(None, ge=1)
    """Tokens that each layer's feed-forward part (MLP) computes at once, e.g. ``2048``: what it has between its
    matrices is there of those alone, and computed again in the backward, for about a fifth more time. For long rows. A
    mixture's experts compute what comes. null: all of a micro-batch."""
    sum_gradients: Literal["auto", "micro_batch", "step"] = "auto"
    """When several ranks sum their gradients, or one brings its own to the host (`offload: true`): after each
    ``micro_batch``, which needs the least memory; or once a ``step``, for which each rank keeps the gradient of the
    whole model in fp32 (4 bytes a parameter). ``auto``: once a step where that takes at most a fifth of the memory that
    is free, but never with `run.deterministic`. The result is the same, up to rounding."""
    reshard_after: Literal["layer", "micro_batch", "update"] = "layer"
    """When ranks let go of the parameters that they have gathered of each layer (or cast, where there is one rank):
    behind the ``layer``, which needs the least memory, and gathers it twice for each micro-batch (ZeRO-3); behind the
    ``micro_batch``, so that its backward finds what its forward has gathered (ZeRO-2); or once an ``update``, so that
    all its micro-batches do. The latter two hold the whole model on each rank, in `model.dtype`, and pay where ranks
    wait for their link; see docs/memory.md. The result is the same."""
    gradient_checkpointing: bool | Literal["selective"] = False
    """Compute activations again in the backward pass instead of keeping them: less memory, about a third more time.
    ``selective``: what matrices and attention gave is kept, and only what is cheap is computed again."""
    offload: bool | Literal["optimizer"] = False
    """What lies in host memory. ``optimizer``: the optimizer's means alone, 8 bytes a parameter less on the GPUs; they
    visit for the update, a part at a time, which takes as long as PCIe needs for them. ``true``: weights and gradients
    too, 16 bytes a parameter in all, and the update is computed by the host. Slow; for models that fit in no other
    way."""
    offload_activations: bool = False
    """What `gradient_checkpointing` keeps for the backward pass, the input of each layer, lies in host memory, e.g.
    ``true``."""
    halve_micro_batches: bool = True
    """A step that does not fit the GPU is tried again with half of `tokens_per_micro_batch`, and so are those after it,
    instead of ending the process. Never on several `ranks`, nor with `run.deterministic`."""
    device: str = "auto"
    """Where it computes, e.g. ``cpu`` or ``cuda``; ``auto``: a GPU where there is one."""
    threads: int = Field(1, ge=1)
    """Compute threads of each process."""
    lora: AdapterConfig | None = None
    """Train an adapter, and beside it the head alone, e.g. ``{rank: 32}``: gradients, optimizer states and checkpoints
    are of these two. Learning rates are about ten times those of whole models. null: train the model. Needs
    `penstock[lora]`."""

    @property
    def updates(self) -> int:
        """Of a step."""
        return self.epochs * self.mini_batches

    @property
    def shards(self) -> int:
        """Ranks that cut what one of the model's copies has of a stage."""
        return self.ranks // (self.replicas * self.tensor_parallel * self.pipeline_parallel)

    @property
    def weights_on_host(self) -> bool:
        """And all else that there is of each."""
        return self.offload is True

    @property
    def means_on_host(self) -> bool:
        """The optimizer's, and they alone."""
        return self.offload == "optimizer"

    @property
    def sends_adapter(self) -> bool:
        """Versions consist of an adapter alone."""
        return False

    def pinned(self) -> Self:
        """As a redo must have it to arrive at the same bits: nothing follows from what memory is free."""
        sums = "micro_batch" if self.sum_gradients == "auto" else self.sum_gradients
        return self.model_copy(update={"halve_micro_batches": False, "sum_gradients": sums})

    @model_validator(mode="after")
    def _ranks_are_dealt(self) -> LearnerConfig:
        if (self.weights_on_host or self.offload_activations) and self.tensor_parallel > 1:
            what = "offload=true" if self.weights_on_host else "offload_activations"
            raise ValueError(
                f"{what}: what ranks of tensor_parallel share must lie where they compute; set one of the two to its "
                f"default{', or offload to optimizer' * self.weights_on_host}"
            )
        if self.tokens_per_mlp and self.gradient_checkpointing == "selective":
            raise ValueError(
                "tokens_per_mlp: selective keeps what matrices gave, those of feed-forward parts too; set "
                "gradient_checkpointing to true or false, or leave tokens_per_mlp out"
            )
        if self.means_on_host and self.optimizer.type == "custom":
            raise ValueError(
                "offload=optimizer: it knows what AdamW and Muon keep, and optimizer.type=custom may keep anything; "
                "set offload to true or false"
            )
        if self.means_on_host and self.optimizer.moments == "8bit":
            raise ValueError(
                "offload=optimizer: moments of 8 bits are updated where they lie, and take a quarter; set "
                "optimizer.moments=float32, or offload=false"
            )
        if self.lora and self.tensor_parallel > 1:
            raise ValueError(
                "tensor_parallel: an adapter's matrices are not cut so; set it to 1, and take more ranks or "
                "sequence_parallel"
            )
        parts = self.replicas * self.sequence_parallel * self.tensor_parallel * self.pipeline_parallel
        if self.ranks % parts:
            stages = f" x pipeline_parallel={self.pipeline_parallel}" if self.pipeline_parallel > 1 else ""
            raise ValueError(
                f"ranks={self.ranks} is no multiple of replicas={self.replicas} x sequence_parallel="
                f"{self.sequence_parallel} x tensor_parallel={self.tensor_parallel}{stages} = {parts}"
            )
        if self.ranks % self.nodes:
            raise ValueError(f"nodes={self.nodes} does not divide ranks={self.ranks}: each machine has as many")
        if self.shards % self.expert_parallel:
            stages = f" / pipeline_parallel={self.pipeline_parallel}" if self.pipeline_parallel > 1 else ""
            raise ValueError(
                f"expert_parallel={self.expert_parallel} does not divide the {self.shards} ranks that cut the model: "
                f"ranks={self.ranks} / replicas={self.replicas} / tensor_parallel={self.tensor_parallel}{stages}"
            )
        return self


class ConstraintConfig(Section):
    """A cost that is kept below a limit: its weight against the reward, a Lagrange multiplier, rises while the mean is
    above (Dai et al. 2023, Safe RLHF)."""

    column: str
    """The cost: a column with a value for each trajectory that the reward's functions or a scorer write, e.g.
    ``reward/length`` (of ``{function: length, weight: 0}``)."""
    limit: float
    """The mean over a step is to be no more, e.g. ``200``."""
    initial: float = Field(0.05, gt=0)
    """The multiplier at the start: what one unit of cost takes off the reward, e.g. ``0.01``. Begin low: where costs
    outweigh all rewards the policy learns to say nothing."""
    rate: float = Field(0.02, gt=0)
    """How fast its logarithm rises in a step, for each unit of cost above the limit, e.g. ``0.001`` for tokens."""
    largest: float = Field(100.0, gt=0)
    """Where it stops."""


class KLConfig(Section):
    """The penalty for leaving the reference model."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of the penalty, e.g. ``0.001``; 0: none, and no reference process."""
    kind: Literal["k1", "abs", "k2", "k3"] = "k3"
    """How the divergence is estimated from the sampled tokens (Schulman 2020); with ``place: reward`` ``k1`` by
    default, as PPO has it. As a term of the loss ``k1`` wants another `gradient`: its own is 0 in the mean. See
    docs/algorithms.md."""
    place: Literal["loss", "reward"] = "loss"
    """``loss``: a term of the loss, with a gradient (GRPO). ``reward``: taken off each token's reward, as PPO does it
    (Ouyang et al. 2022), by the log-probabilities of the policy that sampled."""
    target: float | None = Field(None, gt=0)
    """With ``place: reward``, the divergence in nats a token that the coefficient is steered to (Ziegler et al. 2019),
    e.g. ``0.05``; null: it stays what it is."""
    horizon: float = Field(10000.0, gt=0)
    """Trajectories in which a coefficient with a `target` grows or falls by a fifth at most."""
    gradient: Literal["own", "k2", "unbiased"] = "own"
    """``own``: the gradient of the estimate itself. ``k2``: keep its value, but use the gradient of k2. ``unbiased``:
    the estimate times the ratio of the policy to the one that sampled, whose gradient is that of the divergence itself
    (DeepSeek-V3.2, arXiv:2512.02556, with ``k3``). Of a term of the loss alone."""

    @property
    def in_reward(self) -> bool:
        """It is taken off the reward."""
        return self.place == "reward" and self.coefficient > 0

    @model_validator(mode="before")
    @classmethod
    def _of_rewards(cls, data: Any) -> Any:
        """Of the four, k1 alone has, as a part of the reward, the divergence's gradient."""
        return {"kind": "k1", **data} if isinstance(data, dict) and data.get("place") == "reward" else data

    @model_validator(mode="after")
    def _fits(self) -> KLConfig:
        if self.place == "reward" and not self.coefficient:
            raise ValueError("place: reward takes nothing off at coefficient=0; set a coefficient, e.g. 0.01")
        if self.target is not None and self.place != "reward":
            raise ValueError("target: only a penalty with place=reward has a coefficient that adapts")
        return self


class RewardShape(Section):
    """What the learners see of a reward R: clip((R + shift) · scale, low, high)."""

    shift: float = 0.0
    """Is added first, e.g. ``-0.5``."""
    scale: float = Field(1.0, gt=0)
    """What that is multiplied with, e.g. ``2.0``."""
    low: float | None = None
    """Less is taken for this, e.g. ``-1.0``; null: no bound."""
    high: float | None = None
    """More is taken for this, e.g. ``1.0``; null: no bound."""

    @property
    def changes(self) -> bool:
        """It is not the reward as it is."""
        return (self.shift, self.scale, self.low, self.high) != (0.0, 1.0, None, None)

    @model_validator(mode="after")
    def _a_band(self) -> RewardShape:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low={self.low:g} is not below high={self.high:g}: all rewards would be equal")
        return self


@dataclass(frozen=True)
class Penalties:
    """What is made of the rewards, and taken off them."""

    kl: KLConfig = field(default_factory=KLConfig)
    constraints: tuple[ConstraintConfig, ...] = ()
    shape: RewardShape = field(default_factory=RewardShape)
