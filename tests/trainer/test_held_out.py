"""The loss on held-out rows: beside transformers' own, and what a row that cannot be used costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.pipeline.models.characters import ALPHABET
from penstock.pipeline.models.tiny import make_tokenizer
from penstock.protocols.columns import ColumnTable
from penstock.protocols.experience import Prompt
from penstock.protocols.messages import HeldOutRow
from penstock.services.runtime.errors import SetupError
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.held_out import HeldOut, HeldOutSettings, PairSettings, pack_rows, unpack_rows
from penstock.services.trainer.learner import Learner
from penstock.services.trainer.rank_setup import TrainerSettings
from penstock.services.turns.tokenizer import Tokenizer
from penstock.services.weights.config import WeightsConfig
from tests.trainer.rank_program import a_model

ROWS = [
    HeldOutRow(set="sums", prompt=Prompt(index=0, text="ab=", answer="abc")),
    HeldOutRow(set="words", prompt=Prompt(index=0, text="hgbaf=", answer="abfgh")),
    HeldOutRow(set="sums", prompt=Prompt(index=1, text="d=", answer="d")),
    HeldOutRow(set="sums", prompt=Prompt(index=2, text="e=")),  # which has none
]


@pytest.fixture
def text(tmp_path: Path) -> Tokenizer:
    make_tokenizer(set(ALPHABET)).save_pretrained(tmp_path)
    return Tokenizer(str(tmp_path))


def made(text: Tokenizer, rows: list[HeldOutRow] = ROWS, **settings: Any) -> HeldOut:
    given = HeldOutSettings(sets=("sums", "words"), **settings)
    return HeldOut(given, unpack_rows(pack_rows(rows)), text, steps=25)


@pytest.mark.parametrize("budget", [8, 100_000])
def test_it_is_the_mean_over_the_tokens_of_the_answers(text: Tokenizer, budget: int) -> None:
    model = a_model(vocab_size=256)
    one = Learner(model, TrainerConfig.model_validate({"tokens_per_micro_batch": budget}), temperature=0.7)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    found = made(text).measure(one)

    def loss(*rows: tuple[str, str]) -> float:
        total, count = 0.0, 0
        for prompt, answer in rows:
            asked = text.encode(Prompt(index=0, text=prompt))
            ids = torch.tensor([[*asked, *text.answer_to_text(prompt, answer)]], dtype=torch.int64)
            labels = ids.clone()
            labels[:, : len(asked)] = -100
            said = ids.shape[1] - len(asked)
            total, count = total + float(model(ids, labels=labels).loss.detach()) * said, count + said
        return total / count

    assert found.losses == {
        "sums": pytest.approx(loss(("ab=", "abc"), ("d=", "d")), rel=1e-5),
        "words": pytest.approx(loss(("hgbaf=", "abfgh")), rel=1e-5),
    }
    assert not found.pairs
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "nothing is learned"


def test_it_is_measured_when_it_is_due(text: Tokenizer) -> None:
    assert [version for version in range(26) if made(text, every=10).due(version)] == [0, 10, 20, 25]
    assert [version for version in range(26) if made(text, before=False, every=10).due(version)] == [10, 20, 25]
    assert [version for version in range(26) if made(text).due(version)] == [0, 25]


def test_a_set_of_which_no_row_can_be_used_is_named(text: Tokenizer) -> None:
    with pytest.raises(SetupError, match=r"prompts.eval_given.words: no row can be used; row 0: .*room for 4"):
        made(text, longest=4)


def test_rows_are_no_longer_than_the_model_has_positions(text: Tokenizer, tmp_path: Path) -> None:
    """Or an embedding of positions would be asked for one that it has not."""
    settings = TrainerSettings(
        TrainerConfig(), WeightsConfig(), str(tmp_path), "float32", 1.0, "run", False, tmp_path,
        ColumnTable(columns=()),
        held_out=HeldOutSettings(sets=("sums",), longest=2048),
    )  # fmt: skip
    packed = pack_rows([row for row in ROWS if row.set == "sums"])
    sizes = {10: 2, 4: 1}
    for positions, usable in sizes.items():
        found = settings.held_out_rows(packed, a_model(max_position_embeddings=positions).config)
        assert len(found._sets["sums"].answers) == usable, positions


@pytest.mark.parametrize("shape", ["sigmoid", "ipo"])
def test_of_pairs_it_is_dpos_beside_how_the_run_began(text: Tokenizer, tmp_path: Path, shape: Any) -> None:
    """Also where another process goes on; a row without the other answer has no part in it."""
    rows = [
        HeldOutRow(set="sums", prompt=Prompt(index=0, text="ab=", answer="abc", rejected="ba")),
        HeldOutRow(set="words", prompt=Prompt(index=0, text="hgbaf=", answer="abfgh")),
        HeldOutRow(set="sums", prompt=Prompt(index=1, text="d=", answer="d")),
        HeldOutRow(set="sums", prompt=Prompt(index=2, text="fe=", answer="ef", rejected="fe")),
    ]
    pairs = PairSettings(0.5, shape, tmp_path / "start.npz")
    model = a_model(vocab_size=256)
    one = Learner(model, TrainerConfig.model_validate({}), temperature=0.7)

    def apart() -> torch.Tensor:
        def worth(prompt: str, answer: str) -> torch.Tensor:
            asked = text.encode(Prompt(index=0, text=prompt))
            ids = torch.tensor([[*asked, *text.answer_to_text(prompt, answer)]], dtype=torch.int64)
            logs = model(ids).logits.detach().double().log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])
            return logs[len(asked) - 1 :].sum()

        several = [("ab=", "abc", "ba"), ("fe=", "ef", "fe")]
        return torch.stack([worth(prompt, good) - worth(prompt, bad) for prompt, good, bad in several])

    def loss(of: torch.Tensor) -> float:
        each = -torch.log(torch.sigmoid(0.5 * of)) if shape == "sigmoid" else (of - 1.0) ** 2
        return float(each.mean())

    first = made(text, rows, before=False, pairs=pairs)
    assert first.due(0), "or nobody would know how they began"
    began, before = apart(), first.measure(one)
    assert before.losses["sums"] == pytest.approx(loss(torch.zeros(2)))
    assert before.pairs["sums"] == {"preferred_likelier": 0.0, "preferred_margin": 0.0}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    one.version = 3
    by = apart() - began
    for held_out in (first, made(text, rows, pairs=pairs)):
        found = held_out.measure(one)
        assert found.losses["sums"] == pytest.approx(loss(by), rel=1e-4)
        assert found.pairs == {
            "sums": {
                "preferred_likelier": float((by > 0).double().mean()),
                "preferred_margin": pytest.approx(float(by.mean()), rel=1e-4),
            }
        }
        assert set(found.losses) == {"sums", "words"}
    pairs.start.unlink()
    assert set(first.measure(one).losses) == {"words"}, "of pairs that nobody has seen begin nothing is known"
