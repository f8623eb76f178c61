"""Scorers and engines of the user's own: found, and made to be called as they will be. They are not made: that may take
a model's time and memory."""

from __future__ import annotations

import inspect
from importlib.metadata import entry_points

from penstock.pipeline.config import Config
from penstock.pipeline.preflight.report import Report
from penstock.services.rollout.config import PluginEngineConfig
from penstock.services.runtime.custom_scorer import ScorerConfig, check_methods
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.plugins import load_plugin


def look(config: Config, report: Report) -> None:
    """Adds to ``report`` what is found."""
    for kind, scorer in config.scorers.items():
        with report.collect():
            _look_at(scorer, f"scorers.{kind}")
    engine = config.rollout.engine
    if isinstance(engine, PluginEngineConfig) and not list(entry_points(group="penstock.engines", name=engine.name)):
        with report.collect():
            load_plugin(engine.name, "rollout.engine.name")


def _look_at(scorer: ScorerConfig, key: str) -> None:
    made = load_plugin(scorer.implementation, f"{key}.scorer")
    if not callable(made):
        raise SetupError(f"{key}.scorer: {scorer.scorer} is a {type(made).__name__}, not a class")
    try:
        inspect.signature(made).bind(**scorer.options)
    except TypeError as error:
        raise SetupError(f"{key}.options: {scorer.scorer} cannot be made with them: {error}") from None
    except ValueError:
        pass  # a class without a signature that can be read
    if inspect.isclass(made):
        check_methods(made, scorer, key)
