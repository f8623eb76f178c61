"""Whether the engine can answer evaluation prompts as the config wants it."""

from __future__ import annotations

from typing import Any

from penstock.services.broker.config import FITS
from penstock.services.rollout.config import PluginEngineConfig, TorchEngineConfig


def check_evaluation(config: Any) -> None:
    """Raises `ValueError` where it cannot."""
    engine, prompts = config.rollout.engine, config.prompts
    for learner in ("trainer", "critic"):
        saving = getattr(config, learner).checkpoint
        if saving.keep_best and not prompts.watched:
            raise ValueError(
                f"{learner}.checkpoint.keep_best: nothing is evaluated while the run trains; set prompts.eval or "
                f"prompts.eval_given, and prompts.eval_every={saving.every}"
            )
        if saving.keep_best and prompts.eval_every % saving.every:
            raise ValueError(
                f"{learner}.checkpoint.keep_best: prompts.eval_every={prompts.eval_every} is no multiple of "
                f"{learner}.checkpoint.every={saving.every}: what is evaluated must have a checkpoint"
            )
    for name, how in config.prompts.eval_sampling.items():
        key = f"prompts.eval_sampling.{name}"
        alone = config.run.deterministic and how.n > config.sampling.n
        if alone or (isinstance(engine, TorchEngineConfig) and how.n > engine.max_sequences):
            room = config.sampling.n if alone else engine.max_sequences
            why = "run.deterministic decodes a group at a time" if alone else "rollout.engine.max_sequences"
            raise ValueError(f"{key}.n={how.n} exceeds {room} ({why})")
        longest = None if isinstance(engine, PluginEngineConfig) else engine.max_length
        if how.max_new_tokens == FITS and engine.max_length is None:
            raise ValueError(
                f"{key}.max_new_tokens=fits: only the engine ({engine.name}) knows how long a sequence may be; give a "
                "number, e.g. 1024"
            )
        if longest and isinstance(how.max_new_tokens, int) and how.max_new_tokens >= longest:
            raise ValueError(
                f"{key}.max_new_tokens={how.max_new_tokens} leaves no room for a prompt in rollout.engine.max_length="
                f"{longest}"
            )
