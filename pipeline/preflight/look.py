"""Looks at everything that a config names: data, model, functions, and what this machine must have."""

from __future__ import annotations

from pathlib import Path

from penstock.pipeline.config import Config
from penstock.pipeline.preflight import (
    algorithm,
    data,
    engine,
    environment,
    gateway,
    gpus,
    learners,
    lora,
    machine,
    model,
    pictures,
    reached,
    rewards,
    scorers,
    shown_secrets,
    sources,
    teachers,
    trackers,
)
from penstock.pipeline.preflight.hub import without_hub
from penstock.pipeline.preflight.report import Report
from penstock.pipeline.preflight.steps import done_in
from penstock.pipeline.resources.memory import plan
from penstock.services.runtime import logs
from penstock.services.runtime.gpus import visible_gpus

UNTRIED = "no reward function, no served_teacher and no environment was tried"


def look(config: Config, folder: Path, programs: bool = False, lacking: str = "") -> Report:
    """All that is found, wrong or right, of a run in ``folder``: nothing is raised for what a better config would mend.
    Loads no weights, and starts nothing that stays. ``programs``: those of the config are there; ``lacking``: what this
    machine has not, so that they are not."""
    logs.silence()
    report = Report(done=done_in(folder))
    with without_hub(config, report):
        with report.collect():
            machine.look(config, folder, report)
        parts = (
            gpus, engine, data, pictures, model, lora, learners, rewards, sources, environment, gateway, algorithm,
            scorers, teachers, trackers, reached, shown_secrets,
        )  # fmt: skip
        alone = bool(config.programs) and not programs
        if alone and lacking:
            report.here.append(f"{lacking}; they are not started, so {UNTRIED}")
        elif alone:
            names = ", ".join(f"programs.{name}" for name in config.programs)
            report.notes.append(
                f"{names}: not started here, so {UNTRIED}; `penstock run` starts programs, and where actors are "
                "started one by one they are yours to start"
            )
            report.problems += [
                f"programs.{name}.sleep: `penstock run` puts programs to sleep and wakes them, and where actors are "
                "started one by one nobody does, so that nobody would ask it; leave sleep and wake out"
                for name in config.sleepers
            ]
        for part in parts:
            if not (alone and part in (environment, teachers)):
                part.look(_untried(config) if alone else config, report)
    with report.collect():
        needs = plan(config)
        here = "" if visible_gpus() else "; this machine has none, and would compute on its CPU"
        report.lines += [line + here if line.startswith("GPUs:") else line for line in needs.lines]
        report.problems += needs.problems
    return report


def _untried(config: Config) -> Config:
    """Its reward functions are loaded, and not called."""
    functions = [each.model_copy(update={"trial": False}) for each in config.reward.functions]
    return config.model_copy(update={"reward": config.reward.model_copy(update={"functions": functions})})
