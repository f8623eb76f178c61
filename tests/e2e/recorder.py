"""An engine that writes down whatever it samples, in its own words, before anybody else has it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from penstock.services.rollout.config import RolloutConfig
from penstock.services.rollout.engines.base import Completion, Engine, Refusal
from penstock.services.rollout.service import make_engine
from penstock.services.turns.tokenizer import Tokenizer


def recorded(options: dict[str, Any], model_path: str, dtype: str, stop_ids: set[int]) -> Engine:
    """The engine of the config's section ``options["rollout"]``, with a record in the folder ``options["record"]``."""
    config = RolloutConfig.model_validate(options["rollout"])
    engine = make_engine(config, model_path, dtype, Tokenizer(model_path))
    file = (Path(options["record"]) / f"{os.getpid()}.jsonl").open("a")
    plain = engine.step

    def step() -> list[Completion | Refusal]:
        results = plain()
        for done in results:
            if isinstance(done, Completion):
                sampled = done.tokens.tolist(), done.logprobs.tolist(), done.versions.tolist()
                file.write(json.dumps(sampled) + "\n")
        file.flush()
        return results

    engine.step = step  # type: ignore[method-assign]
    return engine
