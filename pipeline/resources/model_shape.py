"""The sizes of a config's models. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.pipeline.config import Config, PretrainedModel, TinyModel
from penstock.pipeline.resources.model_files import read_config
from penstock.services.modeling.decoder_shape import Shape, described_by


def shape_of(config: Config, model: str | None = None) -> Shape | None:
    """The sizes of the ``model``, a folder or a name on the hub; None: of the policy. None where its config.json is not
    on this machine, or describes no plain decoder."""
    data = read_config(config, model)
    if data is None:
        return None
    if model is None:
        assert isinstance(config.model, PretrainedModel)
        model = config.model.path
    shape = described_by(Path(model).name, data)
    return replace(shape, dtype=config.model.dtype) if shape else None


def tiny_shape(model: TinyModel) -> Shape:
    """A tiny model's sizes, for what is asked of ranks: it fits anywhere, and how many words it knows depends on the
    data."""
    return Shape(
        "tiny", model.hidden_size, model.intermediate_size, model.layers, model.heads, model.kv_heads, model.head_dim,
        0, True, model.max_length, model.experts, model.experts_per_token,
    )  # fmt: skip
