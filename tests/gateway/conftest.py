"""What the gateway's tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.pipeline.models.characters import ALPHABET
from penstock.pipeline.models.tiny import make_tokenizer
from penstock.services.modeling import attention  # noqa: F401 - registers ours
from tests.rollout.test_multi_turn import CHAT
from tests.rollout.test_torch_engine import make


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """By whether it has a chat template: one character a token, 51 of them, as the model has."""
    found = {}
    for chat in (False, True):
        found[chat] = tmp_path_factory.mktemp(f"tokenizer-{chat}")
        tokenizer = make_tokenizer(set(ALPHABET[:48]))
        if chat:
            tokenizer.chat_template = CHAT
        tokenizer.save_pretrained(found[chat])
    return found


@pytest.fixture(scope="session")
def model() -> Any:
    return make("qwen3")
