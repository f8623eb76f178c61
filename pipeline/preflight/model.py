"""The model and its tokenizer, without the weights."""

from __future__ import annotations

from pathlib import Path

from penstock.pipeline.config import Config, PretrainedModel
from penstock.pipeline.preflight.data import ROWS, check_length
from penstock.pipeline.preflight.report import Report
from penstock.services.data import DataError, open_source
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.user_folders import may_be_on_hub

WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")


def look(config: Config, report: Report) -> None:
    """Adds to ``report`` what is found."""
    if config.reference.path and config.with_reference:
        with report.collect():
            _find(config.reference.path, "reference.path")
    if config.critic.path and config.with_critic:
        with report.collect():
            _find(config.critic.path, "critic.path")
    for kind, scorer in config.scorers.items():
        if scorer.scorer == "reward_model" and "path" in scorer.options:
            with report.collect():
                _find(str(scorer.options["path"]), f"scorers.{kind}.options.path")
    if isinstance(config.model, PretrainedModel):
        with report.collect():
            _find(config.model.path, "model.path")
            _encode(config, report)
            _check_routing(config.model.path, config.rollout.sampling.routing_replay)


def _find(path: str, key: str) -> None:
    """Raises `SetupError` where there is no model."""
    folder = Path(path)
    if folder.is_file():
        raise SetupError(f"{key}: {path} is a file; give the folder that it lies in")
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise SetupError(f"{key}: {path} has no config.json, so it is no model's folder in transformers' layout")
        if not any(True for pattern in WEIGHTS for _ in folder.glob(pattern)):
            raise SetupError(f"{key}: {path} has no weights: no *.safetensors")
        return
    if not may_be_on_hub(path):
        raise SetupError(f"{key}: no such folder: {path}; give a folder in transformers' layout, or a name on the hub")
    from penstock.services.modeling.load import load_config

    load_config(path, key)


def _check_routing(path: str, replayed: bool) -> None:
    """Raises `SetupError` where there is nothing to route."""
    from penstock.services.modeling.load import load_config

    text = load_config(path).get_text_config()
    if replayed and not getattr(text, "num_experts", 0):
        raise SetupError(
            f"rollout.sampling.routing_replay: {path} ({text.model_type}) is no mixture of experts that is known; set "
            "it to false"
        )


def _encode(config: Config, report: Report) -> None:
    """The first rows as tokens: the tokenizer and its chat template work, and there is room for an answer."""
    from penstock.services.modeling.lengths import positions_of
    from penstock.services.modeling.load import load_config
    from penstock.services.turns.tokenizer import Tokenizer

    assert isinstance(config.model, PretrainedModel)
    model = load_config(config.model.path)
    tokenizer = Tokenizer(config.model.path, config.template)
    if config.model.chat_template:
        try:
            tokenizer.encode_chat([{"role": "user", "content": "a question"}])
        except Exception as error:  # a template may raise anything
            why = f"{type(error).__name__}: {error}"
            raise SetupError(f"model.chat_template: a chat cannot be told by it: {why}") from error
    if odd := tokenizer.unread():
        raise SetupError(
            f"model.chat_template_kwargs.{odd[0]}: the chat template of {config.model.path} does not look at "
            "it; mend its name, take it out, or, to evaluate another kind of model, give model.chat_template_kwargs={}"
        )
    if report.row is None:
        return
    sizes, source = [], open_source(config.prompts.train)
    for index in range(min(ROWS, len(source))):
        try:
            prompt = source[index]
        except DataError:
            continue  # told of already
        try:
            sizes.append(len(tokenizer.encode(prompt)))
        except Exception as error:  # a template may raise anything
            raise SetupError(
                f"prompts.train: the tokenizer of {config.model.path} cannot encode row {index}: "
                f"{type(error).__name__}: {error}"
            ) from error
    report.lines.append(
        f"model.path: {config.model.path}; the first {len(sizes)} prompts are {min(sizes)} to {max(sizes)} tokens"
    )
    check_length(config, sizes, report, positions_of(model) or 1 << 30)
