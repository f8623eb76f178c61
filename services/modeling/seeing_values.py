"""Models of words and pictures that give one number a token: transformers has such classes for few that see."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def with_values(config_class: Any) -> Any:
    """transformers' class for the models of ``config_class``, which see: the whole base model, read from files by the
    names that it has in them, and a linear layer behind it, as its other families have theirs."""
    from transformers import AutoModel, AutoModelForImageTextToText, PreTrainedModel
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.modeling_layers import GenericForTokenClassification

    base, whole = (auto._model_mapping[config_class] for auto in (AutoModel, AutoModelForImageTextToText))
    family = next(each for each in base.__mro__[1:] if issubclass(each, PreTrainedModel))
    name = f"{base.__name__.removesuffix('Model')}ForTokenClassification"
    by_names = (get_checkpoint_conversion_mapping(known) for known in (whole.__name__, config_class.model_type))
    if converted := next((mapping for mapping in by_names if mapping is not None), None):
        register_checkpoint_conversion_mapping(name, converted, overwrite=True)
    return type(name, (GenericForTokenClassification, family), {"__module__": __name__})
