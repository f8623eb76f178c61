"""What tokens say, one by one, so that together they say what the answer does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from penstock.pipeline.config import Config
from penstock.pipeline.page.folding import folded
from penstock.pipeline.run.folder import model_path
from penstock.services.runtime import checkpoint_folders
from penstock.services.runtime.hub_names import named

log = structlog.get_logger()

UNFINISHED = "\ufffd"
"""What a decoder makes of bytes that are no whole character."""
LONG = 8
"""Tokens that are waited for to make a character whole, which has four bytes at most."""
KEPT = 1 << 17
"""Texts that are remembered: most pairs of tokens come again."""


class Texts:
    """By the tokenizer of the run's model, or where that is not on this machine by a checkpoint's."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._tokenizer: Any = None
        self._decoded = lru_cache(KEPT)(self._decode)
        try:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(_file(config, folder)))
        except Exception as error:  # the library's own errors are plain exceptions
            log.info("no tokens on the page: there is no tokenizer.json at hand", error=str(error))

    @property
    def known(self) -> bool:
        """There is a tokenizer."""
        return self._tokenizer is not None

    def of(self, tokens: np.ndarray, counts: np.ndarray) -> list[str]:
        """Of each, what it adds to the text, and how many it stands for; only where there is a tokenizer."""
        several = zip(self._added(tokens.tolist()), counts.tolist(), strict=True)
        return [text + (f" ×{count:,} " if count > 1 else "") for text, count in several]

    def whole(self, tokens: np.ndarray) -> str:
        """All of ``tokens``, none of which was sampled."""
        places, counts = folded(tokens, np.zeros(len(tokens), bool))
        ends = np.flatnonzero(counts > 1) + 1
        said = ""
        for part, many in zip(np.split(tokens[places], ends), [*counts[ends - 1], 0], strict=True):
            said += self._decode(tuple(part.tolist())) + (f" ×{many:,} " if many else "")
        return said

    def _added(self, tokens: Sequence[int]) -> list[str]:
        """What each adds, decoded behind the one before: a decoder may leave out a space where a text begins. Bytes of
        a character add nothing until it is whole."""
        found: list[str] = []
        before = begun = 0  # tokens from `before` on are decoded, and those from `begun` on are not told yet
        for end, token in enumerate(tokens, 1):
            told, now = self._decoded(tuple(tokens[before:begun])), self._decoded(tuple(tokens[before:end]))
            if now.endswith(UNFINISHED) and end - begun < LONG and end < len(tokens):
                found.append("")
                continue
            same = len(told) if now.startswith(told) else 0
            found.append(now[same:] or self._tokenizer.id_to_token(token) or f"[{token}]")
            before, begun = begun, end
        return found

    def _decode(self, tokens: tuple[int, ...]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def _file(config: Config, folder: Path) -> Path:
    """A tokenizer.json: the model's, here or in the hub's cache, or else the newest checkpoint's. Raises where there is
    none."""
    try:
        path = model_path(config, folder)
        file = Path(path) / "tokenizer.json"
        if file.is_file():
            return file
        from huggingface_hub import try_to_load_from_cache

        name, revision = named(str(path))
        if isinstance(cached := try_to_load_from_cache(name, "tokenizer.json", revision=revision), str):
            return Path(cached)
    except Exception as error:  # what is no name of the hub's; see above
        log.info("the model's tokenizer is not here", error=str(error))
    newest = checkpoint_folders.latest(folder / "checkpoints")
    if newest is None:
        raise FileNotFoundError("neither the model is on this machine nor a checkpoint")
    return newest / "tokenizer.json"
