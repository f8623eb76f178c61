"""A mixture has every row, and its sources in their shares."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.config import Config
from penstock.pipeline.config.sources import OTHER, sources_of
from penstock.protocols.experience import Prompt
from penstock.services.data import DataError, open_source
from penstock.services.data.config import MixData, says_sources
from penstock.services.data.mixture import Mixture


def rows(name: str, count: int) -> list[Prompt]:
    return [Prompt(index=i, text=f"{name} {i}") for i in range(count)]


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.1, 10), min_size=4, max_size=4),
    weighed=st.booleans(),
    begin=st.integers(0, 200),
)
def test_any_stretch_has_the_sources_in_their_shares(
    sizes: list[int], weights: list[float], weighed: bool, begin: int
) -> None:
    sources = {f"s{i}": rows(f"s{i}", size) for i, size in enumerate(sizes)}
    shares = dict(zip(sources, weights if weighed else sizes, strict=False))
    mixture = Mixture(sources, shares if weighed else {}, "prompts.train")
    everything = [*mixture]
    assert {(p.source, p.index) for p in everything} == {(n, i) for n, s in sources.items() for i in range(len(s))}
    names = [prompt.source for prompt in everything]
    assert mixture.one_of_each() == [names.index(name) for name in sources]
    if not weighed:
        assert len(everything) == sum(sizes)
    total = sum(shares.values())
    stretch = everything[min(begin, len(everything)) :][:100]
    found = Counter(prompt.source for prompt in stretch)
    for name, share in shares.items():
        assert abs(found[name] - len(stretch) * share / total) <= 3
    counts = Counter((p.source, p.index) for p in everything)
    for name, source in sources.items():  # those that come again come as often as each other
        often = [counts[name, i] for i in range(len(source))]
        assert max(often) - min(often) <= 1


def test_rows_of_a_mixture_keep_the_source_that_they_say(tmp_path: Path) -> None:
    kinds = ["algebra", "geometry"] * 2
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"q{i}", "answer": "1", "kind": kind}) + "\n" for i, kind in enumerate(kinds))
    )
    math = {"type": "hub", "path": "json", "files": [str(tmp_path / "rows.jsonl")], "truth_key": "answer"}
    mixed = MixData.model_validate({"sources": {"math": {**math, "source_key": "kind"}, "other": math}})
    found: Any = open_source(mixed)
    assert Counter(prompt.source for prompt in found) == {"algebra": 2, "geometry": 2, "other": 4}
    own = [prompt.source for prompt in found if found.is_of("math", prompt)]
    assert sorted(own) == sorted(kinds)
    config = {"model": {"type": "tiny"}, "prompts": {"train": mixed}}
    for asked in ("algebra", "other"):
        judge = {"function": "exact_match", "sources": [asked]}
        every = {"function": "number"}
        assert Config.model_validate({**config, "reward": {"functions": [judge, every]}})
    assert sources_of(mixed) == ["other", OTHER] and says_sources(mixed)


def test_a_mixture_of_a_config_names_its_sources_and_what_is_wrong_with_them() -> None:
    found = open_source(
        MixData.model_validate(
            {"sources": {"short": {"type": "sort", "size": 4, "max_letters": 4}, "long": {"type": "sort", "size": 8}}}
        )
    )
    assert len(found) == 12 and {prompt.source for prompt in found} == {"short", "long"}
    with pytest.raises(ValueError, match="weights: each of sources has one"):
        MixData.model_validate({"sources": {"a": {"type": "sort"}}, "weights": {"b": 1}})
    with pytest.raises(DataError, match="'rare' a larger weight"):
        Mixture({"rare": rows("rare", 1000), "often": rows("often", 10)}, {"rare": 1e-9, "often": 1}, "prompts.train")
    with pytest.raises(DataError, match="prompts.train.sources.none: the data source has no rows"):
        Mixture({"none": []}, {}, "prompts.train")
