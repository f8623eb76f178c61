"""Config sections of the trainer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from penstock.services.learning.adapter_config import AdapterConfig
from penstock.services.learning.config import LearnerConfig
from penstock.services.runtime.errors import SetupError
from penstock.services.trainer.algorithm_config import AlgorithmConfig


class LoraConfig(AdapterConfig):
    """LoRA: a small update of the model's matrices is trained, and the model is not (Hu et al. 2021)."""

    quantize: Literal["nf4"] | None = None
    """``nf4``: the matrices that are added to lie in 4 bits, a quarter of bfloat16's memory (QLoRA, Dettmers et al.
    2023); a step takes a little longer. Rollouts are sent what these matrices then are, in `model.dtype`, with the
    adapter merged; a reference whose `reference.path` is null has them so too. null: they lie in `model.dtype`. Not
    with ``dora``, `publish`: ``adapter``, the head among the `targets`, or `model.dtype`: float16. Needs
    `penstock[qlora]`."""
    publish: Literal["merged", "adapter"] = "merged"
    """What rollouts are sent: the model with the adapter ``merged``; or the ``adapter`` alone, in fp32, which they
    merge with the model that they have on their disk: megabytes a version instead of gigabytes, for rollouts behind a
    slow network."""

    @model_validator(mode="after")
    def _quantized_as_far_as_it_goes(self) -> LoraConfig:
        if self.quantize and self.publish == "adapter":
            raise ValueError(
                "quantize: rollouts would merge the adapter with matrices that are not quantized; set publish to "
                "merged, or quantize to null"
            )
        if self.quantize and self.adapts_head:
            raise ValueError("quantize: the head stays whole; take lm_head out of the targets, or set quantize to null")
        return self


class TrainerConfig(LearnerConfig):
    """The trainer."""

    lora: LoraConfig | None = None
    """Train an adapter, e.g. ``{rank: 32}``: gradients and optimizer states are of that alone, and checkpoints too;
    rollouts are sent the model with it merged, or it alone (`publish`). Learning rates are about ten times those of
    whole models. null: train the model. Needs `penstock[lora]`."""
    freeze: tuple[str, ...] = ()
    """Parameters that do not learn, by patterns of their names, e.g. ``["*.mlp.gate.*"]``, the routers of a mixture of
    experts, or ``["model.embed_tokens.*", "model.layers.[0-3].*"]``: they have no gradient and no optimizer's state.
    What sees pictures stands still by itself, unless `train_towers`."""
    train_towers: bool = False
    """What sees pictures learns too, e.g. ``true``: the towers of a model of words and pictures, all or as `freeze`
    leaves them. Each rank looks at a micro-batch's pictures in each pass, and rollouts at theirs with each version. See
    docs/models.md."""
    steps: int | None = Field(100, ge=0)
    """Training steps; each yields a version. 0: the model is evaluated, and nothing is trained. null: as many as
    `prompts.epochs` makes of `prompts.train`, counted when the run begins; the run's own config.yaml has the number."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """What is learned from the rewards: an advantage, a loss and a correction that compose. Defaults: GRPO, with
    DAPO's mean over all tokens (`preset: grpo` has the paper's). See docs/algorithms.md."""
    max_consecutive_skipped: int = Field(5, ge=1)
    """So many steps in a row whose loss or gradient is not finite (such a step changes no weight) end the run with an
    error."""
    mismatch_warning: float = Field(0.05, gt=0)
    """A step whose KL between the engines' log-probabilities and the trainer's (k3 estimate, nats a token) is above
    this is warned of. See docs/engines.md."""

    norms_every: int = Field(0, ge=0)
    """Every so many steps the length of each layer's gradient, and how far it moves, are among the metrics, e.g.
    ``10``; 0: never. Weights are copied to the host in such a step. See docs/metrics.md."""
    profile_steps: tuple[int, ...] = ()
    """Steps that torch's profiler watches, e.g. ``[10, 11]``: a trace of each rank, in the run's folder ``profiles/``,
    to be opened at ui.perfetto.dev; and, of GPUs, a page with what lay on it, and which line put it there. A step
    that is watched takes longer."""

    @property
    def counted_steps(self) -> int:
        """`steps`, in a run, which has a number. Raises `SetupError` where nobody has counted them."""
        if self.steps is None:
            raise SetupError(
                "trainer.steps: null is counted where a run begins; take the config.yaml of the run's folder, or give "
                "a number, e.g. 100"
            )
        return self.steps

    @property
    def wants_whole(self) -> bool:
        """What it trains no adapter does."""
        return bool(self.freeze or self.train_towers)

    @property
    def sends_adapter(self) -> bool:
        """See `LoraConfig.publish`."""
        return self.lora is not None and self.lora.publish == "adapter"

    def published_dtype(self, dtype: str) -> str:
        """Of versions, where ``dtype`` is `model.dtype`: what is still to be merged is not rounded before."""
        return "float32" if self.sends_adapter else dtype

    @model_validator(mode="after")
    def _routers_see_whole_rows(self) -> TrainerConfig:
        cut = ("pipeline_parallel", "sequence_parallel", "tensor_parallel")
        if self.algorithm.router_balance and (found := [name for name in cut if getattr(self, name) > 1]):
            raise ValueError(
                f"algorithm.router_balance: with {found[0]} above 1 no rank has what all routers say of a token; set "
                "it to 1, and take more ranks, expert_parallel or replicas, or set algorithm.router_balance to 0"
            )
        return self

    @model_validator(mode="after")
    def _adapters_learn_alone(self) -> TrainerConfig:
        if self.lora and self.freeze:
            raise ValueError("freeze: of a model with an adapter (lora) that alone learns; leave one of the two out")
        if self.lora and self.train_towers:
            raise ValueError("train_towers: an adapter (lora) is of the decoder, and learns alone; set it to false")
        return self
