"""The gateway's process, but for its main loop: what it is told of the run, and how it asks the broker."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.pipeline.config import Config
from penstock.protocols import mailbox
from penstock.protocols.experience import Sampling, as_bytes
from penstock.protocols.free_port import OURS, lasting_ports
from penstock.protocols.messages import Note, TurnKey, TurnRequest
from penstock.services.gateway import ports
from penstock.services.gateway.service import Gateway, make
from penstock.services.runtime.actor import ActorContext
from tests.protocols.test_mailbox import Answering
from tests.weights.channel import until


@pytest.fixture
def broker() -> Iterator[Answering]:
    """One that answers nothing."""
    made = Answering()
    made.answer = lambda *_: None
    yield made
    made.close()


def gateway(folder: Path, tokenizer: Path, model: Any, broker: Answering, engine: dict[str, Any]) -> Gateway:
    path = folder / "model"
    path.mkdir(exist_ok=True)
    for file in tokenizer.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    model.config.save_pretrained(path)  # of 128 positions
    context = ActorContext("gateway-0", "run", folder, broker.exchange.address, model_path=str(path))
    config = Config.model_validate(
        {
            "model": {"type": "pretrained", "path": str(path)},
            "prompts": {"train": {"type": "sort"}},
            "rollout": {"engine": engine, "sampling": {"n": 2, "max_new_tokens": 8}},
            "gateway": {"count": 1, "http": "127.0.0.1:0", "bind": "tcp://127.0.0.1:0"},
        }
    )
    return make(context, config, "gateway")


@pytest.mark.parametrize(
    ("engine", "length"),
    [
        ({"type": "torch", "max_length": 64}, 64),
        ({"type": "torch", "max_length": 512}, 128),
        ({"type": "vllm", "max_length": 512}, 128),
        ({"type": "plugin", "name": "openai", "options": {"max_length": 100}}, 100),
        ({"type": "plugin", "name": "sglang", "options": {}}, 128),
        ({"type": "plugin", "name": "mine:Engine", "options": {}}, None),
    ],
)
def test_it_knows_how_long_a_conversation_may_be(
    tmp_path: Path, tokenizers: dict[bool, Path], model: Any, broker: Answering, engine: dict[str, Any],
    length: int | None,
) -> None:  # fmt: skip
    made = gateway(tmp_path, tokenizers[True], model, broker, engine)
    assert made._desk._policy._max_length == length
    made._doors.close()
    made.actor.mailbox.close(0)


def test_a_turn_is_said_again_less_often_than_what_is_small(
    tmp_path: Path, tokenizers: dict[bool, Path], model: Any, broker: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "RESEND_S", 0.2)
    made = gateway(tmp_path, tokenizers[True], model, broker, {"type": "torch"})
    empty, key = as_bytes(b""), TurnKey(purpose="train", number=0, place=0, turn=0)
    made._desk._records._ask(Note(purpose="train", number=0, name="session.0", data=empty), 60)
    prompt = as_bytes(np.ones(4, np.int32).tobytes())
    turn = TurnRequest(key=key, prompt=prompt, sampling=Sampling(), stream=0, note=empty)
    made._desk._policy._say(turn, 60)

    def heard(kind: type[object]) -> int:
        return sum(isinstance(message, kind) for _, _, message in broker.seen)

    until(lambda: heard(TurnRequest) == 4, 20, "the turn")  # at 0, 0.2, 0.6 and 1.4 s
    assert heard(Note) > 5
    made._doors.close()
    made.actor.mailbox.close(0)


def test_one_that_was_killed_is_found_where_it_was(
    tmp_path: Path, tokenizers: dict[bool, Path], model: Any, broker: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "gateways" / "gateway-0.json"

    def opened() -> tuple[dict[str, Any], Gateway]:
        made = gateway(tmp_path, tokenizers[True], model, broker, {"type": "torch"})
        made._doors.open(asyncio.new_event_loop())
        return json.loads(file.read_text()), made

    def ended(made: Gateway) -> None:
        made._doors.close()
        made._doors._http.close()
        made.actor.mailbox.close(0)

    lent = lasting_ports()  # none, where the system lends all of them
    first, made = opened()
    assert not lent or set(first["ports"].values()) <= set(OURS)
    ended(made)
    file.write_text(json.dumps(first))  # as who is killed leaves it
    second, made = opened()
    assert second == first
    ended(made)
    file.write_text(json.dumps(first))
    monkeypatch.setattr(ports, "lasting_ports", lambda: [first["ports"]["zmq"], *lasting_ports()])  # by chance
    with socket.create_server(("127.0.0.1", first["ports"]["http"])):  # another program has it
        third, made = opened()
        assert third["http"] != first["http"] and third["zmq"] == first["zmq"]
        ended(made)
