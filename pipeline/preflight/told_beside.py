"""What the chat template is told beside messages: whether it looks at that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from penstock.pipeline.config import Config
from penstock.protocols.chat import RENDERING
from penstock.services.data.config import MixData
from penstock.services.runtime.errors import SetupError

if TYPE_CHECKING:
    from penstock.services.turns.tokenizer import Tokenizer

KEY = "chat_template_kwargs"


def check(config: Config, path: str, tokenizer: Tokenizer) -> None:
    """Raises `SetupError` where a section of ``config`` has the chat template of the model at ``path`` told what it
    does not look at: a misspelt name would be a choice that nobody makes."""
    own = sorted(RENDERING.intersection(config.template) - {"chat_template"})
    if rendering := [name for name in own if not name.endswith(("_token", "_tokens"))]:
        raise SetupError(
            f"model.{KEY}.{rendering[0]}: whoever renders a chat says it, and not the config; leave it out"
        )
    odd = next(((f"model.{KEY}", name) for name in tokenizer.unread()), None)
    odd = odd or next(((key, name) for key, told in _said(config) for name in told if tokenizer.ignores(name)), None)
    if odd:
        key, name = odd
        if not tokenizer.has_template:
            raise SetupError(f"{key}: {path} has no chat template that could be told; give model.chat_template")
        raise SetupError(
            f"{key}.{name}: the chat template of {path} does not look at it; mend its name, or take it out (of a "
            f"file that is for another kind of model: {key}={{}})"
        )


def _said(config: Config) -> Iterator[tuple[str, dict[str, Any]]]:
    """By key, what sources of prompts have it told."""
    prompts = config.prompts
    every = {"prompts.train": prompts.train}
    every |= {f"prompts.eval.{name}": source for name, source in prompts.eval.items()}
    every |= {f"prompts.eval_given.{name}": source for name, source in prompts.eval_given.items()}
    for key, source in every.items():
        parts: dict[str, Any] = {"": source}
        if isinstance(source, MixData):
            parts = {f".sources.{name}": part for name, part in source.sources.items()}
        for place, part in parts.items():
            yield f"{key}{place}.{KEY}", getattr(part, KEY, {})
