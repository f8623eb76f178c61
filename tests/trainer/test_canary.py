"""The canary is text, the same on every rank, and its bound follows what engines really differ by."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.services.trainer.canary import FACTOR, SEEN, TEXT, CanaryBound, canary_tokens


class Words:
    """A tokenizer that knows letters."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(letter) % 128 for letter in text]


class Ignorant:
    """One that knows none of it."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [0] * len(text)


def config(vocabulary: int = 128, positions: int | None = 512) -> SimpleNamespace:
    text = SimpleNamespace(vocab_size=vocabulary, max_position_embeddings=positions)
    return SimpleNamespace(get_text_config=lambda: text)


def test_it_is_text_where_the_tokenizer_knows_text() -> None:
    found = canary_tokens(Words(), config(), 32)
    assert "".join(map(chr, found)) == TEXT[:32]
    assert len(canary_tokens(Words(), config(positions=9), 32)) == 9
    assert canary_tokens(Words(), config(), 0) == []
    drawn = canary_tokens(Ignorant(), config(50), 32)
    assert len(drawn) == 32 and len(set(drawn)) > 8 and drawn == canary_tokens(Ignorant(), config(50), 32)
    assert max(canary_tokens(Words(), config(20), 32)) < 20, "ids that the model has"


def test_the_bound_is_calibrated_once_and_outlives_the_trainer(tmp_path: Path) -> None:
    path = tmp_path / "canary.json"
    bound = CanaryBound(path, "bfloat16", 0.1, fixed=False)
    for index in range(SEEN):
        assert bound.tolerance == 0.1
        bound.note(0.001 * (index + 1))
    assert bound.tolerance == pytest.approx(FACTOR * 0.001 * SEEN)
    bound.note(1.0)
    assert bound.tolerance == pytest.approx(FACTOR * 0.001 * SEEN), "a later one changes nothing"
    assert CanaryBound(path, "bfloat16", 0.1, fixed=False).tolerance == bound.tolerance
    assert CanaryBound(path, "float32", 0.001, fixed=False).tolerance == 0.001, "another precision begins anew"
    assert json.loads(path.read_text())["tolerance"] == bound.tolerance


def test_it_never_exceeds_the_table_nor_falls_to_nothing(tmp_path: Path) -> None:
    wide, narrow = (CanaryBound(tmp_path / name, "float32", 1e-3, fixed=False) for name in ("a", "b"))
    for _ in range(SEEN):
        wide.note(9e-4)
        narrow.note(1e-9)
    assert wide.tolerance == 1e-3 and narrow.tolerance == pytest.approx(1e-5)
    own = CanaryBound(tmp_path / "c", "float32", 0.05, fixed=True)
    for _ in range(SEEN):
        own.note(1e-6)
    assert own.tolerance == 0.05 and not (tmp_path / "c").exists(), "what the config says stays"
