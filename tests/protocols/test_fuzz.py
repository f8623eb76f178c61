"""Malformed frames by the hundred thousand: no crash, no growth, and valid traffic goes on."""

from __future__ import annotations

import os
import random
import time

import msgpack
import numpy as np
import psutil
import zmq

from penstock.pipeline.harness.ack_server import ack_server
from penstock.protocols import wire
from penstock.protocols.experience import ExperienceError, GroupSummary, as_bytes
from penstock.protocols.mailbox import Mailbox
from penstock.protocols.messages import (
    Ack,
    Commit,
    Credit,
    Finished,
    Heartbeat,
    Hello,
    Message,
    Score,
    Scores,
    Take,
    from_envelope,
    to_envelope,
)
from penstock.protocols.packed_groups import pack_group, unpack_group
from penstock.protocols.router_server import RouterServer
from tests.conftest import make_group

DECODED, LIVE = 200_000, 20_000


SUMMARY = GroupSummary(trajectories=1, tokens=4, sampled=2, oldest=0, newest=0)
FINISHED = {"purpose": "train", "number": 1, "attempt": 1, "summary": SUMMARY.model_dump()}


def seeds() -> list[list[bytes]]:
    """Real messages, as frames."""
    random_ = np.random.default_rng(0)
    group = pack_group(make_group(random_, 3, 4))
    big = as_bytes(bytes(wire.INLINE_BYTES * 2))
    said: list[Message] = [
        Take(step=3),
        Credit(total=7),
        Heartbeat(gauges={"busy": 0.5}, holding={"train": [1, 2, 3]}),
        Hello(kind="rollout", name="r", host="h", pid=1),
        Commit(step=1, groups=[2, 3], digest="d", metrics={"reward": 1.0}),
        Finished(purpose="train", number=3, attempt=1, summary=SUMMARY, experience=as_bytes(group)),
        Finished(purpose="train", number=3, attempt=1, summary=SUMMARY, experience=big),
        Scores(column="reward/exact", scores=[Score(purpose="eval", number=1, values=np.zeros(3, np.float32))]),
    ]
    return [[bytes(f) for f in wire.encode(to_envelope(m, id=5))] for m in said]


def mutate(frames: list[bytes], dice: random.Random) -> list[bytes]:
    """A real message with something wrong, or noise."""
    frames = list(frames)
    match dice.randrange(8):
        case 0:
            return [dice.randbytes(dice.randrange(200)) for _ in range(dice.randrange(1, 4))]
        case 1:
            return frames[1:] or [b""]
        case 2:
            return [*frames, dice.randbytes(9)]
        case 3:  # a header that promises more than there is
            lie = msgpack.ExtType(dice.choice((1, 2, 9)), msgpack.packb(["float32", [dice.randrange(1 << 40)], b"x"]))
            return [msgpack.packb([wire.PROTOCOL, "Finished", 1, 0, {**FINISHED, "experience": lie}])]
        case 4:  # deep nesting
            return [b"\x91" * dice.randrange(1, 3000) + b"\xc0"]
        case 5:
            odd = dice.choice((np.zeros(2, np.int64), None, -1, "x", 1 << 62, [], {}, 1.5))
            fields = [wire.PROTOCOL, "Take", 1, 0, {"step": 1}]
            fields[dice.randrange(5)] = odd
            return [wire.pack(fields)]
    body = bytearray(frames[0])
    for _ in range(dice.randrange(1, 6)):
        place = dice.randrange(len(body))
        choice = dice.randrange(3)
        if choice == 0:
            body[place] = dice.randrange(256)
        elif choice == 1:
            del body[place : place + dice.randrange(1, 9)]
        else:
            body[place:place] = dice.randbytes(dice.randrange(1, 5))
        if not body:
            body = bytearray(b"\x00")
    return [bytes(body), *frames[1:]]


def test_the_decoder_survives_and_does_not_grow() -> None:
    dice, real = random.Random(1), seeds()
    process = psutil.Process(os.getpid())
    before = 0
    refused = accepted = 0
    for count in range(DECODED):
        if count == DECODED // 10:
            before = process.memory_info().rss
        frames = mutate(dice.choice(real), dice)
        try:
            message = from_envelope(wire.decode(frames))
            accepted += 1
            if isinstance(message, Finished):
                unpack_group(message.experience.data)
        except (wire.WireError, ExperienceError):
            refused += 1
    assert refused > DECODED * 0.6 and accepted > 0
    assert process.memory_info().rss - before < 16 << 20


def test_a_live_mailbox_answers_valid_traffic_all_the_while() -> None:
    dice, real, answered = random.Random(2), seeds(), 0
    with ack_server(RouterServer("tcp://127.0.0.1:0")) as exchange:
        rogue = zmq.Context.instance().socket(zmq.DEALER)
        rogue.connect(exchange.address)
        box = Mailbox(exchange.address, "honest#1")
        for count in range(LIVE):
            rogue.send_multipart(mutate(dice.choice(real), dice))
            if count % 200 == 0:
                assert box.ask(Take(step=count), 20) == Ack()
                answered += 1
            while rogue.poll(0):
                rogue.recv_multipart()
        deadline = time.monotonic() + 20
        while exchange.refused < LIVE * 0.5 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert answered == LIVE // 200 and exchange.refused > LIVE * 0.5
        rogue.close(0)
        box.close()
