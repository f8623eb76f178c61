"""What shows a run may go away: the run does not."""

from __future__ import annotations

import io
import signal

import pytest
from rich.console import Console

from penstock.pipeline.observe.terminal import View
from penstock.pipeline.run import launcher

STATE = {
    "metrics": {}, "step": 3, "steps": 10, "phase": "training", "max_lag": 2, "stall": None, "dropped": 0,
    "queues": {"leased": 1, "unscored": 0, "ready": 0}, "totals": {"prompts_dropped": 0, "generated_tokens": 0},
    "evaluations_by_set": {}, "evaluations": {}, "members": {}, "rewards": {}, "lost": {}, "version": 3,
}  # fmt: skip


class Gone(io.StringIO):
    """A terminal that is there, and then is not."""

    gone = False

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.gone:
            raise OSError(5, "Input/output error")
        return super().write(text)

    def flush(self) -> None:
        if self.gone:
            raise OSError(5, "Input/output error")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_that_goes_away_ends_the_view_alone(terminal: bool) -> None:
    file = Gone()
    view = View(Console(file=file, force_terminal=terminal, width=100), "run")
    with view:
        view.note("before")
        assert "before" in file.getvalue()
        file.gone = True
        for _ in range(3):
            view.update(STATE, 0)
            view.note("after")
        view.finish(STATE, 0)


def test_the_end_of_a_terminal_is_an_end_unless_it_is_to_be_ignored() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signal.SIGHUP in launcher.ends()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
        assert launcher.ends() == (signal.SIGINT, signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)
