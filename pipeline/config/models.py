"""Config sections of the model that is trained: one of transformers, or a tiny one that is made on the spot."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from penstock.protocols.versions import Dtype
from penstock.services.runtime.settings import Section


class PretrainedModel(Section):
    """A causal language model of transformers."""

    type: Literal["pretrained"] = "pretrained"
    path: str
    """A folder, or a name on the Hugging Face hub, e.g. ``Qwen/Qwen2.5-0.5B-Instruct``; behind an ``@`` the revision,
    e.g. ``Qwen/Qwen2.5-0.5B-Instruct@7ae5576``, a commit, branch or tag: without it the newest. So with all names of
    the hub."""
    trust_remote_code: bool = False
    """Run the code that came with a model, or its tokenizer, where transformers has none for it: of this one, and of
    those of reference, critic, teachers and graders. It runs in every process of the run, with all that you may do:
    read it first. See docs/models.md."""
    dtype: Dtype = "bfloat16"
    """What all compute in, and what is published; the trainer's master copy is float32. With ``float16`` losses are
    scaled, since small gradients would be lost: see docs/engines.md."""
    chat_template: str | None = None
    """How chats are told to the model, in the place of the tokenizer's own template: a file with a template in Jinja,
    e.g. ``chat.jinja``, or the template itself. Checkpoints have it; null: the tokenizer's own."""
    max_position_embeddings: int | None = Field(None, ge=2)
    """Tokens of the longest sequence, in the place of what the model's config.json says, e.g. ``40960`` for
    Qwen2.5-Math, which says 4096: for policy, reference and critic, in trainer and engines alike, and in checkpoints.
    Beyond what it has learned a model has to learn them, unless `rope_parameters` stretch what it has. null: the
    file's."""
    rope_parameters: dict[str, Any] = {}
    """Of the rotary embedding of positions what is to be other than in the model's config.json, by transformers' names,
    e.g. ``{rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}``, which lets Qwen 3 reach four times
    as far (YaRN, arXiv:2309.00071). For policy, reference and critic, as `max_position_embeddings`."""
    head_dtype: Literal["float32"] | None = None
    """What the head, the last matrix, computes logits in, in trainer, rollouts and reference alike, e.g. ``float32``:
    where `dtype` has 16 bits much of what engine and trainer differ by comes from there (MiniMax 2025, MiniMax-M1,
    arXiv:2506.13585). null: in `dtype`. Of a float32 model it changes nothing. See docs/engines.md."""
    chat_template_kwargs: dict[str, Any] = {}
    """What the tokenizer's chat template is told beside the messages, e.g. ``{enable_thinking: false}`` for Qwen 3's;
    what it may be told is the template's own."""

    @field_validator("rope_parameters")
    @classmethod
    def _is_the_same_for_all_lengths(cls, value: dict[str, Any]) -> dict[str, Any]:
        kind, factor = value.get("rope_type", "default"), value.get("factor")
        if "type" in value or ("factor" in value and "rope_type" not in value):
            raise ValueError("how positions are stretched is rope_type, e.g. {rope_type: yarn, factor: 4.0}")
        if kind not in ("default", "linear", "yarn", "llama3"):
            raise ValueError(f"rope_type={kind!r} is not the same for all lengths; take yarn, linear or llama3")
        if kind != "default" and not (isinstance(factor, int | float) and factor >= 1):
            raise ValueError(f"factor={factor!r}: {kind} wants how far positions are stretched, e.g. factor: 4.0")
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _is_no_template(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "chat_template" in value:
            raise ValueError("chat_template is a key of its own; set model.chat_template")
        return value


class WarmStart(Section):
    """Supervised steps that teach a tiny model the form of an answer, but not yet to be right."""

    steps: int = Field(150, ge=0)
    """How many supervised steps; 0: none, the model starts with random weights."""
    batch: int = Field(128, ge=1)
    """Prompts with their answers in one such step."""
    lr: float = Field(3e-3, gt=0)
    """Learning rate at the first step; it falls to a tenth of it by the last."""
    corrupted: float = Field(0.75, ge=0, le=1)
    """Share of the answers whose characters are shuffled, so that only their form is taught, e.g. ``0.5``: half of
    them. The others are shown as they are, and so is an answer of one character."""


class TinyModel(Section):
    """A character-level Qwen3 made on the spot, so that a run needs no download. It knows small letters, digits, the
    marks of sums, and the characters of the first 2,000 rows of `prompts.train`; any other is ``<unk>`` to it."""

    type: Literal["tiny"] = "tiny"
    hidden_size: int = Field(128, ge=8)
    """Width of the vectors between the layers."""
    intermediate_size: int = Field(512, ge=8)
    """Width inside a layer's feed-forward part."""
    experts: int = Field(0, ge=0)
    """Feed-forward parts of a layer, of which each token takes `experts_per_token`, e.g. ``8``: a mixture of experts, a
    Qwen3-MoE; 0: there is one, for all tokens."""
    experts_per_token: int = Field(2, ge=1)
    """Experts that a token goes to, in a mixture: no more than `experts`."""
    layers: int = Field(2, ge=1)
    """Number of decoder layers."""
    heads: int = Field(4, ge=1)
    """Attention heads of a layer."""
    kv_heads: int = Field(2, ge=1)
    """Heads for keys and values; several attention heads share one, so it must divide `heads`."""
    head_dim: int = Field(32, ge=4)
    """Width of one head, an even number."""
    max_length: int = Field(512, ge=8)
    """Longest prompt and response together that the model can read, in tokens; here a token is a character."""
    dtype: Dtype = "float32"
    """What all compute in, and what is published; the trainer's master copy is float32. With ``float16`` losses are
    scaled, since small gradients would be lost: see docs/engines.md."""
    head_dtype: Literal["float32"] | None = None
    """What the head, the last matrix, computes logits in, in trainer, rollouts and reference alike, e.g. ``float32``:
    where `dtype` has 16 bits much of what engine and trainer differ by comes from there (MiniMax 2025, MiniMax-M1,
    arXiv:2506.13585). null: in `dtype`. Of a float32 model it changes nothing. See docs/engines.md."""
    warm_start: WarmStart = WarmStart()
    """A short supervised start; without it a tiny model would never hit on a right answer to be rewarded for."""

    @model_validator(mode="after")
    def _can_be_made(self) -> TinyModel:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}; set it to a divisor, or 1")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd, and positions turn pairs; set it to an even number")
        if self.experts and self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} is more than experts={self.experts}; set it to fewer"
            )
        return self


ModelConfig = Annotated[PretrainedModel | TinyModel, Field(discriminator="type")]
