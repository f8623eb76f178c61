"""Trackers: packages, keys, and classes of the user's own, which are found and looked at, but not made: that may begin
something at a service of theirs."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from penstock.pipeline.config import Config
from penstock.pipeline.preflight.report import Report
from penstock.services.broker import own_tracker
from penstock.services.broker.tracker_libraries import PACKAGES
from penstock.services.runtime.install import install

WANDB = "api.wandb.ai"


def look(config: Config, report: Report) -> None:
    """Adds to ``report`` what is lacking."""
    trackers = config.run.trackers
    for name in trackers:
        if name not in PACKAGES:
            with report.collect():
                _look_at(name, config, report)
        elif find_spec(PACKAGES[name]) is None:
            report.lacks_package(f"run.trackers: {PACKAGES[name]} is not installed; run: {install(name)}")
    if "wandb" in trackers and not _knows_wandb():
        report.here.append(
            "run.trackers: wandb has no key here; run: wandb login, or set WANDB_API_KEY, or WANDB_MODE=offline"
        )
    if "swanlab" in trackers and not _knows_swanlab():
        report.here.append(
            "run.trackers: swanlab has no key here; run: swanlab login, or set SWANLAB_API_KEY, or SWANLAB_MODE=offline"
        )
    if config.run.tracker_samples and not trackers:
        report.notes.append(
            f"run.tracker_samples={config.run.tracker_samples}: there is no tracker to show answers; name one in "
            "run.trackers"
        )


def _look_at(name: str, config: Config, report: Report) -> None:
    made = own_tracker.find(name)
    if config.run.tracker_samples and isinstance(made, type) and not hasattr(made, "table"):
        report.notes.append(f"run.tracker_samples: {name} has no method table(name, columns, rows): it is shown none")


def _knows_wandb() -> bool:
    """Whether it would speak, or ask for a key and end."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") in ("offline", "disabled"):
        return True
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return netrc.is_file() and WANDB in netrc.read_text(errors="replace")


def _knows_swanlab() -> bool:
    """Likewise."""
    if os.environ.get("SWANLAB_API_KEY") or os.environ.get("SWANLAB_MODE") in ("offline", "local", "disabled"):
        return True
    own = os.environ.get("SWANLAB_ROOT") or os.environ.get("SWANLAB_SAVE_DIR") or "~/.swanlab"
    return any((Path(folder).expanduser() / ".netrc").is_file() for folder in (own, ".swanlab"))
