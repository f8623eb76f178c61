"""What vLLM calls in each of its processes (entry point group ``vllm.general_plugins``)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

OURS = "PENSTOCK_VLLM_PARENT"
"""Set to the rollout's process id in the processes that a rollout starts."""
BACKEND = "penstock"
ADAPTER = 1
"""vLLM's number of the one adapter that lies beside the model, where one does."""

_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Registers our weight-transfer engine, and ends this process when its rollout is killed. Does nothing in a vLLM
    that no rollout has started."""
    parent = os.environ.get(OURS)
    if parent is None:
        return
    if str(os.getpid()) != parent and sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if not Path(f"/proc/{parent}").exists():  # killed before we could ask for the signal
            os._exit(1)
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(
        BACKEND, "penstock.services.rollout.engines.vllm.worker", "ShadowTransfer"
    )
