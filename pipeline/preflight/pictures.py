"""Prompts that show pictures: whether everybody who is asked about them sees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.pipeline.config import Config, PretrainedModel
from penstock.pipeline.preflight.model import readers
from penstock.pipeline.preflight.report import Report
from penstock.protocols.experience import Prompt
from penstock.services.data.picture_files import PictureError, sizes_of, told
from penstock.services.environments.config import key_of
from penstock.services.rollout.config import PluginEngineConfig, VllmEngineConfig
from penstock.services.runtime.custom_scorer import SERVED
from penstock.services.runtime.errors import SetupError

if TYPE_CHECKING:  # it imports torch
    from penstock.services.modeling.pictures import PictureReader

TOLD = 4
"""So many pictures of a row are told of."""
SCREEN = 1920, 1080
"""Width and height by which models are compared."""
BLIND = ("reward_model",)
"""Scorers that read words alone."""


def look(config: Config, report: Report) -> None:
    """Adds to ``report`` what is found."""
    if not config.show_pictures:
        if config.trainer.train_towers:
            report.problems.append(
                "trainer.train_towers: nothing shows pictures, so towers would learn nothing; say where prompts have "
                "theirs (images_key, or pictures: true of who shows some), or set it to false"
            )
        if any(prompt.pictures for prompt in [*report.rows.values(), report.row] if prompt):
            report.problems.append(
                "prompts: some show pictures, and none of the sources says so: set pictures: true of the one that is "
                "custom, so that engines know"
            )
        return
    report.problems += _problems(config)
    if blind := [f"scorers.{kind}" for kind, scorer in config.scorers.items() if scorer.scorer in BLIND]:
        report.notes.append(f"{', '.join(blind)}: it reads the words of prompts alone, with <image> for each picture")
    report.problems += [
        f"scorers.{kind}: a served_teacher is asked about tokens alone, and {_shown_by(config)[0]}; take a teacher "
        "with a path"
        for kind, scorer in config.scorers.items()
        if scorer.scorer == SERVED
    ]
    alike = None
    shown = next((prompt for prompt in [report.row, *report.rows.values()] if prompt and prompt.pictures), None)
    by, without = _shown_by(config)
    for key, path in _models(config):
        with report.collect():
            reader = _reader_of(key, path, by, without)
            if alike is None and shown:
                report.lines.append(f"{key}: row {shown.index} shows {_told(reader, shown)}")
            alike = alike or reader
            _check_alike(key, path, alike, reader, shown)
    if isinstance(config.rollout.engine, VllmEngineConfig) and alike and not alike.folds:
        report.problems.append(
            "rollout.engine.type: vLLM joins line breaks around this model's pictures as transformers does "
            "not; use rollout.engine.type=torch"
        )


def _shown_by(config: Config) -> tuple[str, str]:
    """Who shows pictures, and how that is left out."""
    if config.prompts.show_pictures:
        return "prompts show pictures", "leave out images_key, or pictures of the source that is custom"
    for source, environment in config.rollout.all_environments.items():
        if environment.pictures:
            return "the environment shows pictures", f"set {key_of(source)}.pictures to false"
    return "agents may show pictures", "set gateway.pictures to false"


def _problems(config: Config) -> Iterator[str]:
    engine, (by, _) = config.rollout.engine, _shown_by(config)
    if not isinstance(config.model, PretrainedModel):
        yield f"model.type: a tiny model sees nothing, and {by}; take a pretrained one that sees"
    if config.gateway.count and not config.gateway.pictures:
        yield "gateway.pictures: it is false, and tasks show pictures, which agents are to show on; set it to true"
    if isinstance(engine, PluginEngineConfig):
        yield f"rollout.engine.name: {engine.name} is handed none, and {by}; use rollout.engine.type=torch or vllm"
    if isinstance(engine, VllmEngineConfig) and engine.vllm.get("language_model_only"):
        yield f"rollout.engine.vllm.language_model_only: {by}; leave it out"


def _models(config: Config) -> Iterator[tuple[str, str]]:
    """Key and path of those that are shown them."""
    if isinstance(config.model, PretrainedModel):
        yield "model.path", config.model.path
    yield from readers(config)


def _check_alike(key: str, path: str, policy: PictureReader, reader: PictureReader, row: Prompt | None) -> None:
    """Raises `SetupError` where a model reads other tokens than the policy in the pictures of ``row``, or in one of a
    size that agents and environments may show."""
    try:
        for size in [*sizes_of(row.pictures if row else ()), SCREEN] if reader is not policy else ():
            mine, theirs = (len(each.expansion_of(size)) for each in (policy, reader))
            if mine != theirs:
                raise SetupError(
                    f"{key}: {path} has {theirs} tokens for a picture for which the policy has {mine}; take a model of "
                    "the same family, with the same processor files"
                )
    except PictureError:
        return  # it costs its row


def _told(policy: PictureReader, row: Prompt) -> str:
    """The pictures of ``row``, and how many tokens of the policy's they are."""
    try:
        found = [f"{told(picture)}, {len(policy.expansion(picture))} tokens" for picture in row.pictures[:TOLD]]
    except PictureError as error:  # it costs its row
        return str(error)
    return "; ".join([*found, *([f"{len(row.pictures) - TOLD} more"] if len(row.pictures) > TOLD else [])])


def _reader_of(key: str, path: str, by: str, without: str) -> PictureReader:
    from penstock.services.modeling.load import empty_model, load_config
    from penstock.services.modeling.pictures import PictureReader, placeholder
    from penstock.services.modeling.sight import can_be_shown

    config = load_config(path, key)
    if placeholder(config) < 0:
        raise SetupError(
            f"{key}: {path} ({config.model_type}) sees nothing, and {by}; take a model that sees (docs/models.md), or "
            f"{without}"
        )
    if not can_be_shown(empty_model(path, key=key)):
        raise SetupError(
            f"{key}: transformers has no way to tell a {config.model_type} what its towers have seen "
            "(mm_encoder_outputs); take a model of another family (docs/models.md)"
        )
    return PictureReader(path, key=key)
