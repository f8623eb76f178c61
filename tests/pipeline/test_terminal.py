"""What shows a run may go away: the run does not."""

from __future__ import annotations

import io
import math
import signal
import sys
from pathlib import Path

import pytest
from rich.console import Console
from structlog.testing import CapturingLogger

from penstock.pipeline.observe import terminal as of_terminal
from penstock.pipeline.observe.terminal import View
from penstock.pipeline.report.console import RunConsole
from penstock.pipeline.run import launcher, preparing
from penstock.pipeline.run.supervisor import Supervisor

STATE = {
    "metrics": {}, "step": 3, "steps": 10, "phase": "training", "max_lag": 2, "stall": None, "dropped": 0,
    "filtered": {}, "queues": {"leased": 1, "unscored": 0, "ready": 0},
    "totals": {"prompts_dropped": 0, "generated_tokens": 0},
    "evaluations_by_set": {}, "eval_losses": {}, "eval_pairs": {},
    "evaluations": {}, "members": {}, "rewards": {}, "lost": {},
    "version": 3, "train_s": 9.0, "wall_s": 20.0,
}  # fmt: skip


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> CapturingLogger:
    """What the view has logged."""
    logger = CapturingLogger()
    monkeypatch.setattr(of_terminal, "log", logger)
    return logger


class Gone(io.StringIO):
    """A terminal that is there, and then is not."""

    gone: OSError | None = None

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.gone:
            raise self.gone
        return super().write(text)

    def flush(self) -> None:
        if self.gone:
            raise self.gone


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("how", [OSError(5, "Input/output error"), BrokenPipeError(32, "Broken pipe")])
def test_a_terminal_that_goes_away_ends_the_view_alone(terminal: bool, how: OSError) -> None:
    file = Gone()
    view = View(RunConsole(file=file, force_terminal=terminal, width=100), "run")
    with view:
        view.note("before")
        assert "before" in file.getvalue()
        file.gone = how
        for _ in range(3):
            view.update(STATE, 0)
            view.note("after")
        view.finish(STATE, 0)


@pytest.mark.parametrize("terminal", [True, False])
def test_what_cannot_be_drawn_ends_the_view_with_one_warning(terminal: bool, said: CapturingLogger) -> None:
    file = io.StringIO()
    with View(Console(file=file, force_terminal=terminal, width=100), "run") as view:
        for _ in range(3):
            view.update({"metrics": {}, "step": 3, "phase": "training"}, 0)
            view.note("after")
        view.finish(STATE, 0)
    (warning,) = said.calls
    assert warning.method_name == "warning" and "KeyError" in warning.kwargs["error"]


def test_a_terminal_without_the_letters_that_are_drawn_costs_the_view_alone(said: CapturingLogger) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with View(Console(file=file, force_terminal=True, width=100), "run") as view:
        for step in range(3):
            view.update(STATE | {"step": step}, 0)
        view.finish(STATE, 0)
    (warning,) = said.calls
    assert "UnicodeEncodeError" in warning.kwargs["error"]


def test_a_step_without_a_reward_is_drawn(said: CapturingLogger) -> None:
    file = io.StringIO()
    with View(Console(file=file, force_terminal=True, width=100), "run") as view:
        for step, reward in enumerate((0.25, math.nan, math.inf, 0.5)):
            metrics = {"reward": reward, "lag_mean": 0.0, "lag_max": 0}
            view.update(STATE | {"metrics": metrics, "step": step}, 0)
    assert not said.calls and "0.500  ▁█" in file.getvalue()


def test_who_looks_on_is_told_the_runs_own_time_and_how_long_it_has_to_go() -> None:
    """Whose steps take minutes: by one look, and by several, of which the newest steps count."""

    def seen(view: View, step: int, train_s: float) -> str:
        state = STATE | {"step": step, "steps": 100, "train_s": train_s, "wall_s": train_s + 83.4}
        console = Console(file=io.StringIO(), width=100)
        console.print(view.render(state, 0))
        return console.file.getvalue()  # type: ignore[attr-defined]

    view = View(Console(), "run")
    assert "0:01:23 eta -:--:--" in seen(view, 0, 0.0)
    assert "0:11:23 eta 4:00:00" in seen(view, 4, 600.0)
    assert "0:13:23 eta 3:10:00" in seen(view, 5, 720.0) and "eta 3:10:00" in seen(view, 5, 720.0)
    assert "eta 0:12:30" in seen(View(Console(), "run"), 50, 750.0), "it came late"
    for step in range(26, 60):
        said = seen(view, step, 30_000.0 + 10.0 * step)
    assert "eta 0:06:50" in said
    assert "eta 0:50:00" in seen(view, 50, 3000.0), "steps are done again"


def test_of_an_evaluation_alone_it_is_said_how_many_are_answered() -> None:
    state = STATE | {"step": 0, "steps": 0, "phase": "evaluating_before", "evaluating": {"answered": 40, "size": 60}}
    for terminal, told in ((False, "evaluating: 40/60 answered  0 tok/s  restarts 0\n"), (True, "40/60")):
        file = io.StringIO()
        with View(Console(file=file, force_terminal=terminal, width=100), "run") as view:
            view.update(state, 0)
        assert told in file.getvalue() and "lag" not in file.getvalue() and "reward" not in file.getvalue()


def test_names_are_no_markup(said: CapturingLogger) -> None:
    file = io.StringIO()
    member = {"silent_s": 0.0, "version": 1}
    state = STATE | {
        "evaluations_by_set": {"before": {"math[easy]": 0.5, "x[/b]": 0.25}},
        "members": {"judge[red]-0": member},
    }
    with View(Console(file=file, force_terminal=True, width=100), "run [7]") as view:
        view.update(state, 0)
        view.note("judge[red]-0 died")
    assert not said.calls
    for words in ("math[easy] 0.500, x[/b] 0.250", "judge[red]-0 died", "run [7]", "\x1b[2mgroups"):
        assert words in file.getvalue()
    assert file.getvalue().count("judge[red]-0") > 1


def test_the_end_of_a_terminal_is_an_end_unless_it_is_to_be_ignored() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signal.SIGHUP in launcher.ends()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
        assert launcher.ends() == (signal.SIGINT, signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_how_far_a_warm_start_is_is_said_without_a_terminal_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "EVERY_S", 0)
    said = tmp_path / "prepare.stderr"
    said.write_text("warm start 150/150, loss 0.123\n")  # of one that died
    works = (
        "import time; from penstock.pipeline.models import progress; progress.TELL_S = 0\n"
        "with progress.progress(8) as advance: advance(3, 8, 1.5); time.sleep(0.5)"
    )
    supervisor, console = Supervisor(0), RunConsole(file=io.StringIO())
    child = supervisor.start("prepare", [sys.executable, "-c", works], said, restartable=False, foreign=True)
    preparing.watch(console, child, "making it …", lambda: None)
    assert console.file.getvalue() == "making it …\nwarm start 3/8, loss 1.500\n"  # type: ignore[attr-defined]
