"""Config section of an adapter: what is trained instead of a whole model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from penstock.services.modeling.layer_names import is_called
from penstock.services.runtime.settings import Section


class AdapterConfig(Section):
    """LoRA: a small update of the model's matrices is trained, and the model is not (Hu et al. 2021)."""

    rank: int = Field(16, ge=1)
    """Rank of what is added to a matrix, e.g. ``32``: more can learn more, and needs more memory."""
    alpha: int = Field(32, ge=1)
    """What is added is scaled by alpha / rank, e.g. ``64``; by alpha / sqrt(rank) for ``rslora``."""
    targets: tuple[str, ...] = ()
    """Layers that are added to, by the ends of their names, e.g. ``[q_proj, v_proj]``, or by patterns of whole ones, as
    ``["*.layers.[0-9].mlp.*"]``, of which the linear layers are taken; none: all linear layers but the head."""
    exclude: tuple[str, ...] = ()
    """Layers that are left out of these, by ends or patterns of their names too, e.g. ``[down_proj]``."""
    variant: Literal["lora", "rslora", "dora"] = "lora"
    """``rslora``: scaled so that larger ranks learn as fast (Kalajdzievski 2023). ``dora``: the lengths of the matrix's
    rows are learned beside their directions (Liu et al. 2024)."""
    start: str | None = None
    """A folder with an adapter in peft's layout to begin with, e.g. ``runs/first-try/checkpoints/step-000100``; null:
    one that adds nothing yet. One that was trained with `quantize` wants that, and the `model.dtype` of then; one of
    peft's that has patterns of ranks or alphas, or began by changing its model (PiSSA), is refused."""
    quantize: Literal["nf4"] | None = None
    """``nf4``: the matrices that are added to lie in 4 bits, a quarter of bfloat16's memory (QLoRA, Dettmers et al.
    2023); a step takes a little longer. null: they lie in `model.dtype`. Not with ``dora``, or `model.dtype`: float16.
    Needs `penstock[qlora]`."""

    @property
    def adapts_head(self) -> bool:
        """A language model's head is among the targets."""
        named = any(name.rpartition(".")[2] == "lm_head" for name in self.targets) or is_called("lm_head", self.targets)
        return named and not is_called("lm_head", self.exclude)

    @model_validator(mode="after")
    def _lengths_are_of_whole_rows(self) -> AdapterConfig:
        if self.quantize and self.variant == "dora":
            raise ValueError(
                "quantize: DoRA learns lengths of rows that nobody has in 4 bits; set variant to lora or rslora, or "
                "quantize to null"
            )
        return self
