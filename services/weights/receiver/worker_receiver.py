"""A receiver in a process of an engine: a vLLM worker, say. It connects to the desk of its rollout (`worker_desk`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from penstock.protocols.keys import ClientKeys
from penstock.protocols.mailbox import Mailbox, incarnation_of
from penstock.protocols.messages import Hello, LoadFailed
from penstock.protocols.versions import DigestError
from penstock.services.weights.buffers import neighbourhood
from penstock.services.weights.config import WeightsConfig
from penstock.services.weights.receiver.loader import MappedVersion
from penstock.services.weights.receiver.receiver import Prepared, Receiver

HELLO_DEADLINE_S = 30.0


class _Stager:
    """What a receiver asks of an engine, where the engine loads later: hands on what has arrived."""

    remote = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def prepare(self, weights: Mapping[str, Any], memory: MappedVersion | None = None) -> Mapping[str, Any]:
        """As they lie."""
        return weights

    def score(self, prepared: Any, tokens: np.ndarray) -> np.ndarray:
        """The rollout asks the engine itself, once all workers have loaded."""
        raise NotImplementedError


class WorkerReceiver:
    """``name`` is this worker's among those of its rollout. Versions arrive in a thread beside the engine's; the
    engine's calls `take` and `done`."""

    def __init__(
        self, address: str, name: str, config: WeightsConfig, keys: ClientKeys | None, device: torch.device
    ) -> None:
        mine = keys.to_reach() if keys else None
        self._mailbox = Mailbox(address, incarnation_of(name), mine)
        self._config = config
        self._ready: Prepared | None = None
        self._receiver = Receiver(_Stager(device), self._mailbox, config, keys, deliver=self._deliver)
        self._mailbox.handlers[LoadFailed] = lambda failed: self._receiver.forget(failed.epoch, failed.version)
        hello = Hello(kind="worker", name=name, host=neighbourhood(), pid=os.getpid())
        self._mailbox.ask(hello, HELLO_DEADLINE_S)

    def take(self, epoch: int, version: int) -> Mapping[str, torch.Tensor]:
        """The version's tensors, proved, by name, as they lie in the staging buffer: unchanged until `done`. Raises
        `DigestError` where it is not this version that is ready."""
        ready = self._ready
        if ready is None or (ready.loaded.epoch, ready.loaded.version) != (epoch, version):
            has = f"version {ready.loaded.version}" if ready else "none"
            raise DigestError(f"version {version} is to be loaded, and {has} is ready")
        weights: Mapping[str, torch.Tensor] = ready.weights
        return weights

    def done(self) -> None:
        """What was taken is loaded; nothing was, where the engine has loaded something else."""
        if self._ready:
            self._ready.swapped.set()

    def close(self) -> None:
        """Hangs up."""
        self._receiver.close()
        self._mailbox.close(0.5)

    def _deliver(self, prepared: Prepared) -> None:
        self._ready = prepared
        self._mailbox.ask_later(prepared.loaded, self._config.deadline_s)
