"""The report's plots, as SVG text."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Rows = Sequence[dict[str, Any]]


def _figure(draw: Callable[[Any], None], height: float = 2.6) -> str:
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.fonttype"] = "none"
    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    draw(axes)
    return _svg(figure)


def _svg(figure: Any) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True)
    return out.getvalue()[out.getvalue().index("<svg") :]


def reward(steps: Rows, evaluations: Rows) -> str:
    """Sampled reward a step, and evaluations."""

    def draw(axes: Any) -> None:
        axes.plot([r["step"] for r in steps], [r["reward"] for r in steps], lw=1, label="sampled, training prompts")
        if evaluations:
            names = sorted({name for row in evaluations for name in row["sets"]})
            for name in names:
                points = [(r["step"], r["sets"][name]) for r in evaluations if name in r["sets"]]
                label = "held-out prompts" if len(names) == 1 else name
                axes.plot(*zip(*points, strict=True), "o--", label=f"greedy, {label}")
        axes.set(xlabel="step", ylabel="reward")
        axes.legend(frameon=False)

    return _figure(draw)


LEARNING = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "reference_kl": "KL from the reference, nats",
    "approx_kl": "KL from the sampling policy, nats",
    "clip_fraction": "clipped share of tokens",
    "response_tokens": "response length, tokens",
    "entropy": "entropy: −log p of a token, nats",
    "lr": "learning rate",
}
"""What the panels of `learning` show, where a run has it."""


def learning(steps: Rows) -> str:
    """Small panels: loss, gradient norm, KL, clip share, response length, learning rate."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.fonttype"] = "none"
    shown = {name: label for name, label in LEARNING.items() if any(name in row for row in steps)}
    lines = -(-len(shown) // 2)
    figure = Figure(figsize=(8, 1.7 * lines), layout="constrained")
    for place, (name, label) in enumerate(shown.items(), 1):
        axes = figure.add_subplot(lines, 2, place)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.plot(*zip(*[(row["step"], row[name]) for row in steps if name in row], strict=True), lw=1)
        axes.set_title(label, fontsize=9)
    return _svg(figure)


def columns(steps: Rows, names: Sequence[str]) -> str:
    """Each column's mean: a curve for every reward, and for what other scorers write."""

    def draw(axes: Any) -> None:
        for name in names:
            points = [(row["step"], row[name]) for row in steps if name in row]
            axes.plot(*zip(*points, strict=True), lw=1, label=name)
        axes.set(xlabel="step", ylabel="mean over trajectories, or tokens")
        axes.legend(frameon=False)

    return _figure(draw)


def latency(steps: Rows) -> str:
    """Seconds from when a scorer had a group to its column, mean over the groups scored since the step before."""

    def draw(axes: Any) -> None:
        prefix = "latency/"
        for key in sorted({key for row in steps for key in row if key.startswith(prefix)}):
            points = [(row["step"], max(row[key], 1e-4)) for row in steps if key in row]
            axes.plot(*zip(*points, strict=True), lw=1, label=key.removeprefix(prefix))
        axes.set(xlabel="step", ylabel="seconds", yscale="log")
        axes.legend(frameon=False)

    return _figure(draw)


def lag(steps: Rows) -> str:
    """Lag of the trained tokens, mean and maximum, under the bound that held at each step."""
    bounds = [row["max_lag"] for row in steps]

    def draw(axes: Any) -> None:
        axes.plot([r["step"] for r in steps], [r["lag_mean"] for r in steps], lw=1, label="mean")
        axes.plot([r["step"] for r in steps], [r["lag_max"] for r in steps], lw=1, alpha=0.6, label="maximum")
        axes.step([r["step"] for r in steps], bounds, color="tab:red", ls="--", lw=1, where="mid", label="bound")
        axes.set(xlabel="step", ylabel="versions", ylim=(-0.1, max(bounds) + 0.5))
        axes.legend(frameon=False)

    return _figure(draw)


def mismatch(steps: Rows) -> str:
    """Engines' log-probabilities beside the trainer's: KL (k3), under the warning's bound, and the mean difference."""

    def draw(axes: Any) -> None:
        rows = [r for r in steps if "mismatch_kl_k3" in r]
        for name, label in (("mismatch_kl_k3", "KL (k3), nats a token"), ("mismatch", "mean |Δ log p|")):
            axes.plot([r["step"] for r in rows], [max(r[name], 1e-9) for r in rows], lw=1, label=label)
        if rows:
            axes.axhline(rows[-1]["mismatch_bound"], color="tab:red", ls="--", lw=1, label="KL that is warned of")
        axes.set(xlabel="step", ylabel="mismatch", yscale="log")
        axes.legend(frameon=False)

    return _figure(draw)


def pauses(loads: Rows) -> str:
    """How long each rollout stood still for each version, milliseconds."""

    def draw(axes: Any) -> None:
        for name in sorted({row["receiver"] for row in loads}):
            mine = [row for row in loads if row["receiver"] == name]
            axes.plot([r["version"] for r in mine], [1000 * r["pause_s"] for r in mine], ".", ms=3, label=name)
        axes.set(xlabel="version", ylabel="pause, ms", yscale="log")
        axes.legend(frameon=False)

    return _figure(draw)


def phases(loads: Rows) -> str:
    """Milliseconds of each phase of a version, mean over the rollouts; all but the pause run beside other work."""

    def draw(axes: Any) -> None:
        versions = sorted({row["version"] for row in loads})
        for phase in ("gather_s", "transfer_s", "receive_s", "verify_s", "prepare_s", "pause_s"):
            points = []
            for version in versions:
                found = [row[phase] for row in loads if row["version"] == version and phase in row]
                points.append(1000 * float(np.mean(found)) if found else float("nan"))
            axes.plot(versions, points, lw=1, label=phase.removesuffix("_s"))
        axes.set(xlabel="version", ylabel="ms", yscale="symlog")
        axes.legend(frameon=False, ncols=3)

    return _figure(draw)


def throughput(beats: Rows) -> str:
    """Generated tokens a second, all rollouts together."""
    start = beats[0]["time"] if beats else 0.0

    def draw(axes: Any) -> None:
        rates = [sum(member.get("tokens_per_s", 0.0) for member in beat["actors"].values()) for beat in beats]
        axes.plot([beat["time"] - start for beat in beats], rates, lw=1)
        axes.set(xlabel="seconds", ylabel="generated tokens/s")

    return _figure(draw)


def queues(beats: Rows) -> str:
    """Groups in each queue."""
    start = beats[0]["time"] if beats else 0.0

    def draw(axes: Any) -> None:
        for name in beats[0]["queues"] if beats else ():
            axes.plot([b["time"] - start for b in beats], [b["queues"][name] for b in beats], lw=1, label=name)
        axes.set(xlabel="seconds", ylabel="groups")
        axes.legend(frameon=False)

    return _figure(draw)


def busy(beats: Rows) -> str:
    """Share of each second that each actor worked: dark is busy, light is idle, white is not there."""
    start = beats[0]["time"] if beats else 0.0
    names = sorted({name for beat in beats for name in beat["actors"]})

    def draw(axes: Any) -> None:
        for row, name in enumerate(names):
            here = [(b["time"] - start, b["actors"][name].get("busy", 0.0)) for b in beats if name in b["actors"]]
            gaps = np.diff([at for at, _ in here])
            width = float(np.median(gaps)) if len(gaps) else 1.0
            for at, share in here:
                axes.barh(row, width, left=at, height=0.8, color=(0.12, 0.37, 0.6), alpha=0.08 + 0.92 * share, lw=0)
        axes.set(xlabel="seconds", yticks=range(len(names)), yticklabels=names)
        axes.grid(visible=False)

    return _figure(draw, height=0.6 + 0.35 * max(1, len(names)))
