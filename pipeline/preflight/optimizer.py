"""What keeps an optimizer's moments in 8 bits."""

from __future__ import annotations

from importlib.util import find_spec

from penstock.pipeline.config import Config
from penstock.pipeline.preflight.report import Report
from penstock.services.runtime.install import install


def look(config: Config, report: Report) -> None:
    """Adds to ``report`` what is wrong."""
    learners = {"trainer": config.trainer} | ({"critic": config.critic} if config.with_critic else {})
    for name, learner in learners.items():
        if learner.optimizer.moments == "8bit" and find_spec("torchao") is None:
            report.lacks_package(
                f"{name}.optimizer.moments=8bit: torchao is not installed; run: {install('adam8bit')}, or set it to "
                "float32"
            )
