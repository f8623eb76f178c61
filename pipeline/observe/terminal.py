"""The live view of a run: a dashboard on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

import structlog
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from penstock.pipeline.observe.pace import Pace, clock
from penstock.pipeline.report.findings import other_store
from penstock.services.runtime.plain import plain

log = structlog.get_logger()

PLAIN_EVERY_S = 5.0
BARS = "▁▂▃▄▅▆▇█"


class View:
    """Shows the broker's state as it changes."""

    def __init__(self, console: Console, title: str) -> None:
        self._console, self._title = console, title
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn(),
            TextColumn("{task.fields[elapsed]} eta {task.fields[left]}"), expand=True,
        )  # fmt: skip
        self._task = self._progress.add_task("starting", total=None, elapsed="", left="")
        self._pace = Pace()
        self._rewards: deque[float] = deque(maxlen=60)
        self._step = -1
        self._phase = self._said = ""
        self._plain_at = 0.0
        self._over = False
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None

    def __enter__(self) -> View:
        with self._seen():
            if self._live:
                self._live.start()
        return self

    @contextmanager
    def _seen(self) -> Iterator[None]:
        """A terminal that goes away, a pipe that nobody reads any more, or what cannot be drawn, ends the view, and not
        the run."""
        try:
            yield
        except Exception as error:
            if not self._over:
                log.warning("nobody sees the run any more: it goes on", error=f"{type(error).__name__}: {error}")
            self._over = True
            live, self._live = self._live, None
            with suppress(Exception):  # it draws once more what could not be drawn
                if live:
                    live.stop()  # which takes back what it has done to stdout

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._seen():
            if self._live:
                self._live.stop()

    def note(self, text: str) -> None:
        """A line of its own, such as a restart."""
        if self._over:
            return
        with self._seen():
            self._console.print(text, highlight=False, markup=False)

    def update(self, state: dict[str, Any], restarts: int) -> None:
        """Shows ``state`` (`protocols.messages.Status`)."""
        if self._over:
            return
        with self._seen():
            self._show(state, restarts)

    def _show(self, state: dict[str, Any], restarts: int) -> None:
        metrics = state["metrics"]
        if metrics and state["step"] != self._step:
            self._rewards += [metrics["reward"]] * math.isfinite(metrics["reward"])
            self._step = state["step"]
        phase = state["phase"].replace("_", " ")
        if self._live:
            self._live.update(self.render(state, restarts), refresh=True)
        elif time.monotonic() - self._plain_at > PLAIN_EVERY_S or (phase != self._phase and self._phase):
            self._plain_at = time.monotonic()
            self._say(self._line(state, phase, restarts))
        self._phase = phase

    def finish(self, state: dict[str, Any], restarts: int) -> None:
        """Shows how it ended: the last frame, all of it however low the terminal is."""
        if self._over:
            return
        with self._seen():
            if self._live:
                self._live.vertical_overflow = "visible"
                self._show(state, restarts)
            elif (line := self._line(state, state["phase"].replace("_", " "), restarts)) != self._said:
                self._say(line)

    def _say(self, line: str) -> None:
        self._said = line
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _line(self, state: dict[str, Any], phase: str, restarts: int) -> str:
        metrics, queues = state["metrics"], state["queues"]
        name, value = learned(metrics)
        lag = f"{metrics['lag_mean']:.2f}" if metrics else "-"
        answered = f"{_answered(state)}  " * bool(phase.startswith("evaluating") and _answered(state))
        trained = (
            f"step {state['step']}/{state['steps']}  {name} {value}  lag {lag} (bound {state['max_lag']})  "
            f"groups leased={queues['leased']} unscored={queues['unscored']} ready={queues['ready']}  "
        )
        return (
            (f"{phase}: {trained}" if state["steps"] else f"{phase.partition(' ')[0]}: ")
            + f"{answered}{_tokens_per_s(state):,.0f} tok/s  restarts {restarts}"
            + "".join(f"  {words}" for words in _failing(state))
            + (f"  stall: {plain(state['stall'])}" if state["stall"] else "")
        )

    def render(self, state: dict[str, Any], restarts: int) -> Panel:
        """The whole of it, as it is now."""
        phase = state["phase"].replace("_", " ")
        self._pace.tell(state["step"], state["train_s"])
        under_way = state.get("evaluating") or {"answered": 0, "size": None}
        done, total = state["step"], state["steps"] or None
        if not total:  # an evaluation alone
            phase, done, total = phase.partition(" ")[0], under_way["answered"], under_way["size"]
        self._progress.update(
            self._task, description=phase, completed=done, total=total,
            elapsed=clock(state["wall_s"]), left=self._pace.left(state["steps"]),
        )  # fmt: skip
        metrics, queues = state["metrics"], state["queues"]
        facts = Table.grid(padding=(0, 3))
        name, value = learned(metrics)
        shown: dict[str, Any] = {
            name: f"{value}  {_spark(self._rewards)}" if metrics else value,
            "lag": f"mean {metrics['lag_mean']:.2f}, max {metrics['lag_max']:.0f} of {state['max_lag']}"
            if metrics
            else "-",
            "mismatch": _mismatch(metrics),
            "groups": "  ".join(f"{name} {depth}" for name, depth in queues.items()),
            "tokens/s": f"{_tokens_per_s(state):,.0f} generated",
            "dropped": f"{state['dropped']} groups, {state['totals']['prompts_dropped']} of them for their prompts"
            + (f", {sum(state['filtered'].values())} by replay.filter" if state["filtered"] else ""),
        }
        if not state["steps"]:
            shown = {name: shown[name] for name in ("tokens/s", "dropped")}
        if state["evaluations_by_set"]:
            shown["evaluation"] = _evaluation(state)
        if state["eval_losses"]:
            shown["held-out loss"] = _held_out_loss(state)
        for name, value in shown.items():
            facts.add_row(Text(name, style="dim"), Text(value) if isinstance(value, str) else value)
        actors = Table(expand=True, box=None, header_style="dim")
        for column in ("actor", "state", "version", "pause", "busy", ""):
            actors.add_column(column)
        for name, member in sorted(state["members"].items()):
            late = member["silent_s"] > 3
            health = Text(f"silent {member['silent_s']:.0f} s", "yellow") if late else Text("alive", "green")
            busy = f"{member.get('busy', 0) * 100:3.0f} %"
            rate = f"{member['tokens_per_s']:,.0f} tok/s" if member.get("tokens_per_s") else ""
            version = str(member["version"]) if member["version"] >= 0 else "-"
            pause = f"{member['pause_s'] * 1000:.1f} ms" if member.get("pause_s") is not None else ""
            actors.add_row(Text(plain(name)), health, version, pause, busy, rate)
        for words in _failing(state):
            facts.add_row(Text("failing", style="yellow"), Text(words, "yellow"))
        if state["stall"]:
            facts.add_row(Text("stall", style="red"), Text(plain(state["stall"]), "red"))
        for name, silent_s in state["lost"].items():
            actors.add_row(Text(plain(name)), Text(f"lost: silent for {silent_s:.0f} s", "red"), "-", "", "", "")
        title = f"{self._title}  ·  version {max(0, state['version'])}  ·  restarts {restarts}"
        return Panel(Group(self._progress, facts, actors), title=Text(title), title_align="left")


def _answered(state: dict[str, Any]) -> str:
    """Of the evaluation that is under way, e.g. ``40/60 answered``; empty: none is."""
    under_way = state.get("evaluating")
    return f"{under_way['answered']}/{under_way['size']} answered" if under_way else ""


def _failing(state: dict[str, Any]) -> list[str]:
    """``reward my_module:judge: 12 of 40 calls failed: 12 timed out``"""
    rewards = [f"{said['source']}: {said['words']}" for said in state["rewards"].values() if said["failed"]]
    rewards += other_store(state)
    rewards += [f"{learner}.checkpoint.then: {words}" for learner, words in state.get("then_failed", {}).items()]
    rewards += [f"tracker {name}: {words}" for name, words in state.get("trackers", {}).items()]
    return list(map(plain, rewards))


def learned(metrics: dict[str, Any]) -> tuple[str, str]:
    """What the last step says of how far the policy is, and how much of it: where it was only given answers, how
    unlikely they still were, or how far apart pairs of them."""
    if not metrics:
        return "reward", "-"
    given = "given_nll" in metrics and not math.isfinite(metrics["reward"])
    pairs = metrics.get("preferred_margin") is not None  # of which one answer is to become unlikely
    name = ("preferred_margin" if pairs else "given_nll") if given else "reward"
    return name, f"{metrics[name]:.3f}"


def _tokens_per_s(state: dict[str, Any]) -> float:
    return sum(member.get("tokens_per_s", 0.0) for member in state["members"].values())


def _evaluation(state: dict[str, Any]) -> str:
    """The last one, each set of it."""
    label, sets = list(state["evaluations_by_set"].items())[-1]
    means = ", ".join(f"{name} {'-' if mean is None else f'{mean:.3f}'}" for name, mean in sets.items())
    return f"{label}: {means}"


def _held_out_loss(state: dict[str, Any]) -> str:
    """The newest, on each set."""
    step, sets = list(state["eval_losses"].items())[-1]
    pairs = state["eval_pairs"].get(step, {}).items()
    right = {name: f" ({100 * found['preferred_likelier']:.0f} % of pairs the right way)" for name, found in pairs}
    return f"after step {step}: " + ", ".join(f"{name} {loss:.4f}{right.get(name, '')}" for name, loss in sets.items())


def _mismatch(metrics: dict[str, Any]) -> Text:
    """Engines' log-probabilities beside the trainer's, last step."""
    if "mismatch_kl_k3" not in metrics:
        return Text("-")
    kl, high = metrics["mismatch_kl_k3"], metrics["mismatch_kl_k3"] > metrics.get("mismatch_bound", float("inf"))
    text = (
        f"KL {kl:.2g}, mean |Δ log p| {metrics['mismatch']:.2g}, max {metrics['mismatch_max']:.2g}, "
        f"effective samples {100 * metrics['mismatch_ess']:.0f} %"
    )
    return Text(
        text + (f"  above trainer.mismatch_warning={metrics['mismatch_bound']:g}" if high else ""), "yellow" * high
    )


def _spark(values: deque[float]) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / ((high - low) or 1)
    return "".join(BARS[int((value - low) * scale)] for value in values)
