"""What a model's folder says of how to sample from it: transformers' ``generation_config.json``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from penstock.services.modeling.answer_end import stop_ids, template_end


def write_generation_config(told: Any, tokenizer: Any, folder: Path) -> None:
    """Writes ``told``, transformers' GenerationConfig, into ``folder``, with all tokens at which a rollout ends:
    whoever loads the model is to stop there too. Its own ``save_pretrained`` refuses what ``from_pretrained`` takes
    from many a model's files: a temperature without ``do_sample``."""
    told = copy.deepcopy(told)
    ends = sorted(stop_ids(tokenizer, told, template_end(tokenizer)))
    told.eos_token_id = ends[0] if len(ends) == 1 else ends or None
    told.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
