"""Models that give one number a token, of families for which transformers has no such class."""

from __future__ import annotations

from typing import Any


def with_values(config: Any, language: Any) -> Any:
    """transformers' auto class for models that give one number a token, which knows the family of ``config``; models of
    words, or of words and pictures, of that family are those of the auto class ``language``."""
    from transformers import AutoModel, AutoModelForTokenClassification

    of: Any = type(config)
    known = of in AutoModelForTokenClassification._model_mapping
    if not known and of in AutoModel._model_mapping and of in language._model_mapping:
        made = _made(AutoModel._model_mapping[of], language._model_mapping[of])
        # None exists: without that word it passes over a class of transformers' own configs, and says nothing.
        AutoModelForTokenClassification.register(of, made, exist_ok=True)
    return AutoModelForTokenClassification


def _made(base: Any, whole: Any) -> Any:
    """The ``base`` model of a family, read from files by the names that it has in them within the ``whole`` one, and a
    linear layer behind it, as other families have theirs."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.modeling_layers import GenericForTokenClassification

    family = next(each for each in base.__mro__[1:] if issubclass(each, PreTrainedModel))
    name = f"{base.__name__.removesuffix('Model')}ForTokenClassification"
    by_names = (get_checkpoint_conversion_mapping(known) for known in (whole.__name__, base.config_class.model_type))
    if converted := next((mapping for mapping in by_names if mapping is not None), None):
        register_checkpoint_conversion_mapping(name, converted, overwrite=True)
    own = {"config_class": base.config_class, "base_model_prefix": whole.base_model_prefix}
    # What is from elsewhere transformers takes for code that came with a model, and fills by other rules.
    return type(name, (GenericForTokenClassification, family), own | {"__module__": family.__module__})
