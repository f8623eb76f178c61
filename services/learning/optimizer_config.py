"""The config section of a learner's optimizer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from penstock.services.runtime.settings import Section

OF_TYPE = {
    "muon": ("momentum", "nesterov", "newton_schulz", "rms", "betas", "eps"),
    "adamw": ("betas", "eps", "moments"),
    "custom": ("name", "options"),
}
"""Keys of an optimizer that are of some types alone."""


class OptimizerConfig(Section):
    """AdamW; or Muon for hidden matrices, and AdamW for all else; or another one by its name."""

    type: Literal["adamw", "muon", "custom"] = "adamw"
    """``adamw`` (Loshchilov and Hutter 2019); or ``muon`` (Jordan et al. 2024): a hidden matrix moves along the mean of
    its gradient with all singular values made alike, about as far as by AdamW (Moonlight, arXiv:2502.16982). Embedding,
    head, vectors, and all that is no hidden matrix, stay with AdamW. ``custom``: the one that `name` says. See
    docs/algorithms.md."""
    name: str | None = None
    """With ``custom``: ``module:Class`` of torch's or your own, e.g. ``torch.optim:SGD``, which keeps nothing of a
    parameter."""
    options: dict[str, Any] = {}
    """With ``custom``: what the class is made with beside `lr` and `weight_decay`, e.g. ``{momentum: 0.9}``."""
    lr: float = Field(1e-6, gt=0)
    """Learning rate after the warm-up, e.g. ``1.0e-05``; of both, where there are two."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """How slowly Muon's running mean of the gradient forgets, e.g. ``0.9``."""
    nesterov: bool = True
    """Muon moves along the mean as it will be if the next gradient is this one again (Nesterov)."""
    newton_schulz: int = Field(5, ge=1, le=20)
    """Steps of the Newton-Schulz iteration that makes singular values alike, e.g. ``6``."""
    rms: float = Field(0.2, gt=0)
    """Root mean square of what Muon adds to a matrix, as a multiple of the learning rate, e.g. ``0.4``; 0.2 is about
    what AdamW adds."""
    betas: tuple[float, float] = (0.9, 0.95)
    """How slowly AdamW's two running means forget: of the gradient, and of its square, e.g. ``[0.9, 0.999]``."""
    eps: float = Field(1e-8, gt=0)
    """Added to AdamW's divisor, so that it is never 0."""
    weight_decay: float = Field(0.0, ge=0)
    """How strongly weights are drawn towards 0, as a multiple of the learning rate, e.g. ``0.01``; 0: not."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises from near 0 to `lr`, e.g. ``10``."""
    warmup_share: float = Field(0.0, ge=0, lt=1)
    """The same as a share of all steps, in the place of `warmup_steps`, e.g. ``0.05``."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up: it stays, or falls to `final_lr_share` of itself by the last step."""
    decay_share: float | None = Field(None, gt=0, le=1)
    """With ``linear`` or ``cosine``: the share of all steps, the last ones, over which it falls, e.g. ``0.2``; before
    them it stays (warm-up, stable, decay: Hu et al. 2024, MiniCPM, arXiv:2404.06395). null: all after the warm-up."""
    final_lr_share: float = Field(0.0, ge=0, le=1)
    """Share of the learning rate that is left at the last step, e.g. ``0.1``."""
    moments: Literal["float32", "8bit"] = "float32"
    """How AdamW's two means are kept: in ``float32``, or in ``8bit``, which takes 2 bytes a parameter instead of 8 and
    is not exact (block-wise quantization, Dettmers et al. 2021). Needs `penstock[adam8bit]`."""
    max_grad_norm: float = Field(1.0, gt=0)
    """A gradient that is longer than this (2-norm over all parameters) is scaled down to it."""

    @property
    def visits(self) -> bool:
        """What it keeps may lie on the host, and visit for the update."""
        return self.type != "custom" and self.moments != "8bit"

    @model_validator(mode="after")
    def _of_its_type(self) -> OptimizerConfig:
        if self.type == "muon" and self.moments == "8bit":
            raise ValueError("moments=8bit: muon keeps its means in float32 alone; set moments=float32, or type=adamw")
        plain = {key: field.get_default(call_default_factory=True) for key, field in type(self).model_fields.items()}
        for key in {key for keys in OF_TYPE.values() for key in keys} - {*OF_TYPE[self.type]}:
            having = sorted(kind for kind, keys in OF_TYPE.items() if key in keys)
            if getattr(self, key) != plain[key]:
                raise ValueError(f"{key} is a key of type={' and '.join(having)} alone; set that, or leave {key} out")
        if self.type == "custom" and not self.name:
            raise ValueError("type=custom wants the class as name, e.g. name: torch.optim:SGD")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={list(self.betas)}: each is at least 0 and below 1, e.g. [0.9, 0.95]")
        return self

    @model_validator(mode="after")
    def _a_schedule(self) -> OptimizerConfig:
        if self.warmup_steps and self.warmup_share:
            raise ValueError(
                "warmup_share: the warm-up's length is given as warmup_steps too; leave one of the two out"
            )
        if self.decay_share and self.schedule == "constant":
            raise ValueError("decay_share: with schedule=constant the rate never falls; set schedule=linear or cosine")
        if self.decay_share and self.warmup_share + self.decay_share > 1:
            raise ValueError(
                f"warmup_share={self.warmup_share:g} and decay_share={self.decay_share:g} are more than all steps "
                "together; lower one of the two"
            )
        return self
