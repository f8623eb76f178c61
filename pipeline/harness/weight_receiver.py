"""One receiver of `penstock bench weights`, in a process of its own; started by it, not by hand.

Reads commands as JSON lines from stdin: ``{"bare": …}`` takes part in a bare broadcast. Writes a JSON line for
everything that happens; times are of the system-wide monotonic clock.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import structlog
import torch
import torch.distributed as dist

from penstock.pipeline.bench import plain_gloo
from penstock.protocols.experience import Sampling
from penstock.protocols.mailbox import Mailbox
from penstock.protocols.messages import Bye, Hello
from penstock.services.rollout.config import TorchEngineConfig
from penstock.services.rollout.engines.base import Request
from penstock.services.rollout.engines.torch.engine import TorchEngine
from penstock.services.runtime.actor import end
from penstock.services.weights.config import WeightsConfig
from penstock.services.weights.receiver.loader import MappedVersion
from penstock.services.weights.receiver.receiver import Prepared, Receiver

NEW_TOKENS = 200
SEQUENCES = 8


class Plain:
    """Serves by holding on to what it was given."""

    device = torch.device("cpu")
    remote = False
    version = -1

    def prepare(
        self, weights: Mapping[str, torch.Tensor], memory: MappedVersion | None = None
    ) -> Mapping[str, torch.Tensor]:
        """As it is."""
        return weights

    def score(self, prepared: Any, tokens: np.ndarray) -> np.ndarray:
        """Nothing to compute with."""
        return np.zeros(len(tokens) - 1, np.float32)

    def swap(self, prepared: Any, version: int) -> None:
        """A pointer."""
        self.version = version


def say(**row: Any) -> None:
    """One line to the benchmark."""
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def listen(mailbox: Mailbox) -> None:
    """Commands from stdin, until it is closed."""
    for line in sys.stdin:
        mailbox.post(json.loads(line))
    mailbox.post(None)


def bare_broadcast(command: dict[str, Any], name: str) -> None:
    """Receives as plain gloo does, once for each size of buckets."""
    address, _, port = command["store"].rpartition(":")
    store = dist.TCPStore(address, int(port), is_master=False, timeout=plain_gloo.STALL)
    ranks = command["ranks"]
    group = plain_gloo.meet(store, command["name"], ranks[name], len(ranks) + 1)
    for bucket_bytes in command["buckets"]:
        plain_gloo.broadcast(group, plain_gloo.buffer(command["nbytes"]), bucket_bytes)
        say(bare=time.monotonic())


def generating(model: str) -> TorchEngine:
    """An engine that is kept busy with sequences of like length."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    limits = TorchEngineConfig(max_sequences=SEQUENCES, max_length=16 + NEW_TOKENS)
    return TorchEngine(limits, config, "bfloat16", set(), str)


def main() -> None:
    """Joins the relay at argv[1] as argv[2], with the config argv[3] (JSON)."""
    address, name, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    torch.set_num_threads(options["threads"])
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    mailbox = Mailbox(address, name)
    engine: Any = generating(options["model"]) if options.get("model") else Plain()
    receiver = Receiver(engine, mailbox, WeightsConfig.model_validate(options["weights"]), verify=options["verify"])
    joined = time.monotonic()
    mailbox.ask(Hello(kind="rollout", name=name, host="", pid=os.getpid()), 30)
    threading.Thread(target=listen, args=(mailbox,), daemon=True).start()
    steps: list[float] = []
    number = 0
    while True:
        idle = engine.version < 0 or isinstance(engine, Plain)
        if not idle:
            while engine.pending() < SEQUENCES:
                number += 1
                prompt = np.arange(8, dtype=np.int32)
                engine.submit(Request(number, 0, prompt, Sampling(n=1, max_new_tokens=NEW_TOKENS)))
            engine.step()
            steps.append(time.monotonic())
        while idle or not mailbox.inbox.empty():
            event = mailbox.inbox.get()
            if event is None:
                mailbox.tell(Bye(reason="measured"))
                receiver.close()
                mailbox.close()
                end(0)
            if isinstance(event, Prepared):
                ready = time.monotonic()
                engine.swap(event.weights, event.loaded.version)
                event.swapped.set()
                pause = time.monotonic() - ready
                mailbox.ask_later(event.loaded.model_copy(update={"pause_s": pause}), 30)
                said = event.loaded.model_dump() | {"pause_s": pause, "name": name, "at": ready, "joined": joined}
                say(**said, steps=steps)
                steps = []
                break
            if isinstance(event, dict) and "bare" in event:
                bare_broadcast(event["bare"], name)


if __name__ == "__main__":
    main()
