"""Steps under torch's profiler (`trainer.profile_steps`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import structlog
import torch
from torch.profiler import ProfilerActivity, profile

log = structlog.get_logger()


@contextmanager
def profiled(step: int, steps: Sequence[int], folder: Path, rank: str) -> Iterator[None]:
    """Around the training of ``step``: where it is one of ``steps``, a trace of it (Chrome's format, which Perfetto
    opens) is written to ``folder``, with the shapes of what is computed and the memory that it takes. ``rank`` is what
    this process is called."""
    if step not in steps:
        yield
        return
    cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with profile(activities=[ProfilerActivity.CPU, *cuda], record_shapes=True, profile_memory=True) as found:
        yield
    path = folder / f"{rank}-step-{step:06d}.json.gz"
    try:
        folder.mkdir(exist_ok=True)
        found.export_chrome_trace(str(path))
        log.info("profiled", step=step, path=str(path))
    except (OSError, RuntimeError) as error:  # it costs the trace, and not the step
        log.warning("a trace could not be written", step=step, path=str(path), error=str(error))
