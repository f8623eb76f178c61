"""Looks at everything that a config names: data, model, functions, and what this machine must have."""

from __future__ import annotations

import logging
from pathlib import Path

import structlog

from penstock.pipeline.config import Config
from penstock.pipeline.preflight import (
    algorithm,
    data,
    environment,
    gateway,
    gpus,
    learners,
    lora,
    machine,
    model,
    pictures,
    rewards,
    scorers,
    sources,
    trackers,
)
from penstock.pipeline.preflight.hub import without_hub
from penstock.pipeline.preflight.report import Report
from penstock.pipeline.resources.memory import plan
from penstock.services.runtime.gpus import visible_gpus


def look(config: Config, folder: Path) -> Report:
    """All that is found, wrong or right, of a run in ``folder``: nothing is raised for what a better config would mend.
    Loads no weights, and starts nothing that stays."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    report = Report()
    with without_hub(config, report):
        machine.look(config, folder, report)
        parts = (
            gpus, data, pictures, model, lora, learners, rewards, sources, environment, gateway, algorithm, scorers,
            trackers,
        )  # fmt: skip
        for part in parts:
            part.look(config, report)
    needs = plan(config)
    here = "" if visible_gpus() else "; this machine has none, and would compute on its CPU"
    report.lines += [line + here if line.startswith("GPUs:") else line for line in needs.lines]
    report.problems += needs.problems
    return report
