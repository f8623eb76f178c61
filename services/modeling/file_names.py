"""What a model's files call its tensors, where that is not what transformers calls them in memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def names_in_files(model: Any, keys: Iterable[str]) -> dict[str, str]:
    """By name in ``model``, which may be without memory: which of a file's ``keys`` it is, by transformers' own table
    of the family. What has the same name in both, or is not one tensor of the file, is not there."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    wanted = model.state_dict()
    others = [key for key in keys if key not in wanted]
    if not others:
        return {}
    renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    found = {rename_source_key(key, renamings, [], model.base_model_prefix, wanted)[0]: key for key in others}
    return {name: key for name, key in found.items() if name in wanted}
