"""The Hugging Face hub, or its absence."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from penstock.pipeline.config import Config, PretrainedModel
from penstock.pipeline.preflight.report import Report
from penstock.services.data.config import HubData, MixData
from penstock.services.data.hub import FORMATS
from penstock.services.runtime.custom_scorer import BUILT_IN
from penstock.services.runtime.hub_names import may_be_on_hub

ANSWER_S = 2.0
OFFLINE = "HF_HUB_OFFLINE"
READERS = ("huggingface_hub.constants", "datasets.config")
"""Modules that keep what the variable said under its name."""


def keys(config: Config) -> set[str]:
    """The keys of ``config`` that name something on the hub."""
    found = set()
    if isinstance(config.model, PretrainedModel) and may_be_on_hub(config.model.path):
        found.add("model.path")
    others = {"reference.path": config.reference.path, "critic.path": config.critic.path}
    for kind, scorer in config.scorers.items():
        if scorer.scorer in BUILT_IN:  # what the options of a class of the user's say is the class's matter
            others[f"scorers.{kind}.options.path"] = scorer.options.get("path")
    found |= {key for key, path in others.items() if path and may_be_on_hub(str(path))}
    sources = {"prompts.train": config.prompts.train}
    for place, sets in (("eval", config.prompts.eval), ("eval_given", config.prompts.eval_given)):
        sources |= {f"prompts.{place}.{name}": source for name, source in sets.items()}
    for key, mixed in list(sources.items()):
        if isinstance(mixed, MixData):
            sources |= {f"{key}.sources.{name}": source for name, source in mixed.sources.items()}
    for key, source in sources.items():
        local = Path(source.path).suffix in FORMATS if isinstance(source, HubData) else True
        if isinstance(source, HubData) and not source.files and source.path not in FORMATS.values() and not local:
            found.add(f"{key}.path")
    return found


def unreachable() -> bool:
    """Nobody answers where the hub should be; False where a proxy would be asked, which cannot be told so simply."""
    if os.environ.get(OFFLINE, "0") not in ("", "0"):
        return True
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return False
    end = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        socket.create_connection((end.hostname or "", end.port or 443), ANSWER_S).close()
    except OSError:
        return True
    return False


@contextmanager
def without_hub(config: Config, report: Report) -> Iterator[None]:
    """Where the hub is needed and does not answer, libraries look into their caches alone: they would try for minutes.
    What is not there either is this machine's lack, not the config's."""
    wanted = keys(config)
    if not wanted or not unreachable():
        yield
        return
    before = os.environ.get(OFFLINE)
    os.environ[OFFLINE] = "1"
    # Libraries that are loaded already have read the variable.
    loaded = [module for module in map(sys.modules.get, READERS) if module]
    read = [getattr(module, OFFLINE) for module in loaded]
    for module in loaded:
        setattr(module, OFFLINE, True)
    try:
        yield
    finally:
        for module, value in zip(loaded, read, strict=True):
            setattr(module, OFFLINE, value)
        if before is None:
            del os.environ[OFFLINE]
        else:
            os.environ[OFFLINE] = before
    missing = [problem for problem in report.problems if problem.partition(":")[0] in wanted]
    report.problems = [problem for problem in report.problems if problem not in missing]
    said = "(HF_HUB_OFFLINE is set)" if before else "(it does not answer)"
    report.here += [problem.replace("(HF_HUB_OFFLINE is set)", said) for problem in missing]
