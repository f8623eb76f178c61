"""Steps that are watched (`trainer.profile_steps`): by torch's profiler, and by the allocator of a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import structlog
import torch
from torch.profiler import ProfilerActivity, profile

log = structlog.get_logger()

MOST_ALLOCATIONS = 200_000
"""Events of a step that are kept, the last ones: each takes some kilobytes of the host's memory."""


@contextmanager
def profiled(step: int, steps: Sequence[int], folder: Path, rank: str, device: torch.device) -> Iterator[None]:
    """Around the training of ``step``: where it is one of ``steps``, a trace of it (Chrome's format, which Perfetto
    opens) is written to ``folder``, with the shapes of what is computed and the memory that it takes; and, of a GPU,
    `allocations`. ``rank`` is what this process is called."""
    if step not in steps:
        yield
        return
    cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    path = folder / f"{rank}-step-{step:06d}.json.gz"
    watch = allocations(path.with_name(f"{rank}-step-{step:06d}-memory.html")) if cuda else nullcontext()
    with watch, profile(activities=[ProfilerActivity.CPU, *cuda], record_shapes=True, profile_memory=True) as found:
        yield
    try:
        folder.mkdir(exist_ok=True)
        found.export_chrome_trace(str(path))
        log.info("profiled", step=step, path=str(path))
    except (OSError, RuntimeError) as error:  # it costs the trace, and not the step
        log.warning("a trace could not be written", step=step, path=str(path), error=str(error))


@contextmanager
def allocations(path: Path) -> Iterator[None]:
    """What lies on this process's GPU meanwhile, and which line of code has put it there: a page at ``path`` for a
    browser, which fetches torch's viewer. Also where what is watched fails, for want of memory, say."""
    try:
        torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
    except RuntimeError as error:  # not every allocator has one
        log.warning("a step's allocations are not noted", error=str(error))
        yield
        return
    try:
        yield
    finally:
        try:
            from torch.cuda._memory_viz import trace_plot

            found = trace_plot(torch.cuda.memory._snapshot())
            torch.cuda.memory._record_memory_history(enabled=None)
            path.parent.mkdir(exist_ok=True)
            path.write_text(found)
        except Exception as error:  # torch's own tool; it costs the page, and not the step
            log.warning("a step's allocations could not be written", path=str(path), error=str(error))
