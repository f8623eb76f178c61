"""A row that is no prompt costs itself alone, whatever is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest

from penstock.protocols.experience import Prompt
from penstock.services.data import DataError, open_source
from penstock.services.data.config import HubData, ReasoningGymData
from penstock.services.data.source import PromptSource


def pictures(folder: Path, **config: Any) -> Any:
    """Rows with a picture, of which one is none."""
    rows = {"prompt": ["1+1=", "1+2="], "truth": ["2", "3"], "picture": [{"bytes": b"no picture", "path": None}] * 2}
    kinds = {"prompt": datasets.Value("string"), "truth": datasets.Value("string"), "picture": datasets.Image()}
    datasets.Dataset.from_dict(rows, features=datasets.Features(kinds)).to_parquet(folder / "rows.parquet")
    return open_source(HubData(path="parquet", files=[str(folder / "rows.parquet")], chat=False, **config))


def test_what_no_column_of_the_prompt_has_is_not_decoded(tmp_path: Path) -> None:
    rows = pictures(tmp_path, truth_key="truth")
    assert [(row.text, row.truth) for row in rows] == [("1+1=", "2"), ("1+2=", "3")]


def test_a_cell_that_cannot_be_decoded_costs_its_row(tmp_path: Path) -> None:
    rows = pictures(tmp_path)
    with pytest.raises(DataError, match="row 1: "):
        rows[1]


def test_a_generator_that_raises_costs_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    rows: Any = open_source(ReasoningGymData(task="chain_sum", size=2))
    monkeypatch.setattr(rows, "_tasks", [{"question": "1+1=", "metadata": {(1, 2): 3}}, {"question": "1+2="}])
    with pytest.raises(DataError, match="row 0: TypeError: keys must be"):
        rows[0]
    assert rows[1].text == "1+2="


class Odd(PromptSource):
    """Whose second row raises."""

    def __len__(self) -> int:
        return 3

    def prompt(self, index: int) -> Prompt:
        if index == 1:
            raise KeyError("question")
        return Prompt(index=index, text="1+1=")


def test_whatever_a_source_raises_is_an_error_of_the_row() -> None:
    rows = Odd()
    assert [row.index for row in rows[::2]] == [0, 2]
    for ask in (lambda: rows[1], lambda: rows[:], lambda: list(rows)):
        with pytest.raises(DataError, match="row 1: KeyError: 'question'"):
            ask()
