"""The sizes of a config's models. Imports torch for those that see alone, whose towers are counted by their class."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock.pipeline.config import Config, PretrainedModel, TinyModel
from penstock.pipeline.resources.model_files import config_file, read_config
from penstock.services.modeling.decoder_shape import Shape, described_by
from penstock.services.modeling.lengths import longest_sequence


def shape_of(config: Config, model: str | None = None) -> Shape | None:
    """The sizes of the ``model``, a folder or a name on the hub; None: of the policy. None where its config.json is not
    on this machine, or describes no plain decoder."""
    data, own = read_config(config, model), model is None
    if data is None:
        return None
    if model is None:
        assert isinstance(config.model, PretrainedModel)
        model = config.model.path
    shape = described_by(Path(model).name, data)
    if shape is None:
        return None
    towers = _towers(config_file(config, model).parent) if "vision_config" in data else 0
    longest = longest_sequence(config.rollout.engine, shape.max_length) or 0
    if own and config.trainer.freeze:
        still, ends = _still(config_file(config, model).parent, config.trainer.freeze)
        shape = replace(shape, still=still, still_ends=ends)
    if own and towers and config.trainer.train_towers:
        shape = replace(shape, learned_towers=_towers(config_file(config, model).parent, config.trainer.freeze))
    return replace(shape, dtype=config.model.dtype, towers=towers, sees=config.show_pictures, longest=longest)


def critic_shape(config: Config) -> Shape | None:
    """As `shape_of`, of a critic, whose towers stand still whatever the policy's do."""
    shape = shape_of(config, config.critic.path)
    return shape and replace(shape, learned_towers=0)


@lru_cache(maxsize=8)
def _towers(folder: Path, frozen: tuple[str, ...] = ()) -> int:
    """Parameters of the towers of the model whose config.json lies in ``folder``, but those that are ``frozen``; 0
    where they cannot be told."""
    from penstock.services.modeling.freezing import freeze
    from penstock.services.modeling.load import empty_model
    from penstock.services.modeling.towers import towers
    from penstock.services.runtime.errors import SetupError

    try:
        freeze(model := empty_model(str(folder)), frozen)
    except SetupError:  # a look at the model says more of it
        return 0
    every = (parameter for tower in towers(model).values() for parameter in tower.parameters())
    return sum(parameter.numel() for parameter in every if parameter.requires_grad)


@lru_cache(maxsize=8)
def _still(folder: Path, patterns: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[int, int]]:
    """`Shape.still` and `Shape.still_ends` of the model whose config.json lies in ``folder``; none where that cannot be
    told: a look at the model says more of it."""
    from penstock.services.modeling.freezing import freeze
    from penstock.services.modeling.load import empty_model
    from penstock.services.modeling.towers import decoder_of
    from penstock.services.runtime.errors import SetupError

    try:
        freeze(model := empty_model(str(folder)), patterns)
    except SetupError:
        return (), (0, 0)

    def of(module: Any) -> int:
        every = module.parameters() if module is not None else ()
        return sum(each.numel() for each in every if not each.requires_grad and each.ndim > 1 and min(each.shape) > 1)

    ends = of(model.get_input_embeddings()), of(model.get_output_embeddings())
    return tuple(of(layer) for layer in decoder_of(model).layers), ends


def tiny_shape(model: TinyModel) -> Shape:
    """A tiny model's sizes, for what is asked of ranks: it fits anywhere, and how many words it knows depends on the
    data."""
    return Shape(
        "tiny", model.hidden_size, model.intermediate_size, model.layers, model.heads, model.kv_heads, model.head_dim,
        0, True, model.max_length, model.experts, model.experts_per_token,
    )  # fmt: skip
