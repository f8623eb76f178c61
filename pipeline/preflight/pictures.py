"""Prompts that show pictures: whether everybody who is asked about them sees."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.pipeline.config import Config, PretrainedModel
from penstock.pipeline.preflight.model import readers
from penstock.pipeline.preflight.report import Report
from penstock.services.rollout.config import PluginEngineConfig, VllmEngineConfig
from penstock.services.runtime.errors import SetupError

BLIND = ("reward_model",)
"""Scorers that read words alone."""


def look(config: Config, report: Report) -> None:
    """Adds to ``report`` what is found."""
    shown = config.prompts.show_pictures
    if not shown:
        if any(prompt.pictures for prompt in [*report.rows.values(), report.row] if prompt):
            report.problems.append(
                "prompts: some show pictures, and none of the sources says so: set pictures: true of the one that is "
                "custom, so that engines know"
            )
        return
    report.problems += _problems(config)
    if blind := [f"scorers.{kind}" for kind, scorer in config.scorers.items() if scorer.scorer in BLIND]:
        report.notes.append(f"{', '.join(blind)}: it reads the words of prompts alone, with <image> for each picture")
    for key, path in _models(config):
        with report.collect():
            _check_sees(key, path)


def _problems(config: Config) -> Iterator[str]:
    engine = config.rollout.engine
    if not isinstance(config.model, PretrainedModel):
        yield "model.type: a tiny model sees nothing, and prompts show pictures; take a pretrained one that sees"
    if config.gateway.count:
        yield "gateway.count: agents are asked in words alone, and prompts show pictures; set it to 0"
    if isinstance(engine, PluginEngineConfig):
        yield (
            f"rollout.engine.name: {engine.name} is handed no pictures, and prompts show some; use "
            "rollout.engine.type=torch or vllm"
        )
    if isinstance(engine, VllmEngineConfig) and engine.vllm.get("language_model_only"):
        yield "rollout.engine.vllm.language_model_only: prompts show pictures; leave it out"


def _models(config: Config) -> Iterator[tuple[str, str]]:
    """Key and path of those that are shown them."""
    if isinstance(config.model, PretrainedModel):
        yield "model.path", config.model.path
    yield from readers(config)


def _check_sees(key: str, path: str) -> None:
    from penstock.services.modeling.load import load_config
    from penstock.services.modeling.pictures import PictureReader
    from penstock.services.modeling.sight import placeholder

    config = load_config(path, key)
    if placeholder(config) < 0:
        raise SetupError(
            f"{key}: {path} ({config.model_type}) sees nothing, and prompts show pictures; take a model that sees "
            "(docs/models.md), or leave images_key out"
        )
    PictureReader(path, key=key)
