"""Kills by schedule: at steps and at events of a run, never by the clock. A seed makes the schedule."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.services.runtime.failpoint import VARIABLE
from tests.e2e.runs import QUICKSTART, Run, check_promises
from tests.redis_log import append_only_file

ACTORS = ("trainer", "broker", "redis", "rollout-0", "rollout-1", "reward-0", "reference-0")
STOPPABLE = ("rollout-0", "trainer", "broker")
POINTS = ("taken", "trained", "committed", "published")

SMALL = ["gate.groups_per_step=8", "gate.prefetch=8", "rollout.sampling.n=4", "prompts.eval_size=16"]
SMALL += ["model.warm_start.steps=2", "model.warm_start.batch=16"]
COMMON = ["broker.dead_after_s=4", "trainer.checkpoint.every=7", "run.max_restarts=50"]


@dataclass(frozen=True)
class Act:
    """What is done once ``step`` is committed."""

    step: int
    kind: str
    """kill, stop (SIGSTOP, and SIGCONT after ``seconds``), or tear (Redis killed, its append-only file cut)."""
    targets: tuple[str, ...]
    seconds: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """Acts at steps, and points at which the trainer kills itself."""

    seed: int
    acts: tuple[Act, ...]
    points: tuple[str, ...]

    @property
    def kills(self) -> int:
        """How many processes are killed."""
        return sum(len(act.targets) for act in self.acts if act.kind != "stop") + len(self.points)


def schedule(seed: int, steps: int, count: int) -> Schedule:
    """``count`` acts of all kinds spread over ``steps`` steps, in between the trainer's own deaths at each point."""
    dice = random.Random(seed)
    at = sorted(dice.sample(range(2, steps - 2), count + len(POINTS)))
    chosen = dice.sample(at, len(POINTS))
    points = tuple(f"{point}:{step}" for point, step in zip(POINTS, chosen, strict=True))
    acts = []
    for step in (s for s in at if s not in chosen):
        kind = dice.choices(("kill", "pair", "stop", "tear"), (6, 2, 1, 1))[0]
        if kind == "kill":
            acts.append(Act(step, "kill", (dice.choice(ACTORS),)))
        elif kind == "pair":
            acts.append(Act(step, "kill", tuple(dice.sample(ACTORS, 2))))
        elif kind == "stop":
            acts.append(Act(step, "stop", (dice.choice(STOPPABLE),), dice.choice((1.0, 6.0))))
        else:
            acts.append(Act(step, "tear", ("redis",)))
    return Schedule(seed, tuple(acts), points)


def carry_out(folder: Path, plan: Schedule, overrides: list[str], seconds: float = 600) -> dict[str, Any]:
    """Runs the quickstart with ``overrides`` under ``plan``; checks the promises; returns the summary."""
    print(f"\nseed {plan.seed}: {plan.kills} kills\n  points {', '.join(plan.points)}")
    log = folder / "reached"
    os.environ[VARIABLE], os.environ["PENSTOCK_KILL_LOG"] = ",".join(plan.points), str(log)
    try:
        run = Run(folder, [*COMMON, *overrides], QUICKSTART)
    finally:
        del os.environ[VARIABLE], os.environ["PENSTOCK_KILL_LOG"]
    for act in plan.acts:
        print(f"  after step {act.step}: {act.kind} {', '.join(act.targets)} {act.seconds or ''}")
        run.wait_for_step(act.step, 200)
        _do(run, act)
    summary = run.wait(seconds)
    check_promises(summary)
    reached = log.read_text().split() if log.exists() else []
    assert sorted(reached) == sorted(plan.points), f"points reached: {reached}"
    print(f"  lost {summary['groups_lost']}, twice {summary['groups_trained_twice']}, restarts {summary['restarts']}")
    return summary


def _do(run: Run, act: Act) -> None:
    processes = run.actors()
    deadline = time.monotonic() + 60
    while not set(act.targets) <= processes.keys() and time.monotonic() < deadline:
        time.sleep(0.05)  # it is being started again after the act before
        processes = run.actors()
    victims = [processes[target] for target in act.targets]
    if act.kind == "stop":
        for victim in victims:
            victim.send_signal(signal.SIGSTOP)
        time.sleep(act.seconds)
        for victim in victims:
            if victim.is_running():
                victim.send_signal(signal.SIGCONT)
        return
    for victim in victims:
        victim.send_signal(signal.SIGKILL)
    if act.kind == "tear":
        torn = append_only_file(run.folder)
        os.truncate(torn, max(0, torn.stat().st_size - 3000))
