"""Turns of agents, over the real engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.pipeline.models.characters import ALPHABET
from penstock.pipeline.models.tiny import make_tokenizer
from penstock.protocols import messages as m
from penstock.protocols.experience import Sampling, as_bytes
from penstock.services.rollout.engines.base import Completion, Request
from penstock.services.rollout.turn_server import TurnServer
from penstock.services.turns.tokenizer import Tokenizer
from tests.rollout.test_torch_engine import engine_for, make


def test_a_turn_that_nobody_waits_for_takes_no_seat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tokenizer(set(ALPHABET[:48])).save_pretrained(tmp_path)
    engine = engine_for(make("qwen3"), {1})
    turns = TurnServer(engine, Tokenizer(str(tmp_path)))
    submitted: list[Request] = []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda request: (submitted.append(request), submit(request)))
    for id in (1, 2):
        prompt = as_bytes(np.array([3, 4], np.int32).tobytes())
        asked = m.Generate(id=id, seed=5, prompt=prompt, sampling=Sampling(n=1, max_new_tokens=40), stream=id)
        assert turns.start(asked.model_copy(update={"unread": id == 2})) is None
    assert [request.unread for request in submitted] == [False, True]
    engine.step()
    assert turns.drop(1) and not turns.drop(1) and not turns.drop(7)
    assert not turns.has(1) and turns.has(2) and engine.pending() == 1
    ended = []
    while engine.pending():
        ended += [each.number for each in engine.step() if isinstance(each, Completion)]
    assert ended == [2]
