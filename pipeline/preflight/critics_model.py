"""The model that a critic begins as."""

from __future__ import annotations

from pathlib import Path

from penstock.pipeline.config import Config
from penstock.pipeline.preflight.own_code import check_own_code
from penstock.pipeline.tools.merge import is_critic
from penstock.protocols.columns import VALUES
from penstock.services.runtime.errors import SetupError


def check_critic(path: str, key: str, config: Config) -> None:
    """Raises `SetupError` where the model at ``path`` cannot be the kind of critic that ``config`` has."""
    if config.critic_column == VALUES:
        _check_value_head(path, key)
        return
    if is_critic(Path(path)):
        raise SetupError(f"{key}: {path} is a critic of values, and process rewards want a language model; name one")
    check_own_code(path, "critic", config.critic.gradient_checkpointing)


def _check_value_head(path: str, key: str) -> None:
    """Raises `SetupError` where there is no model of the kind that gives one number a token, nor the parts of one."""
    from penstock.services.modeling.load import load_config, with_head

    config = load_config(path, key)
    if type(config) not in with_head(config, "value")._model_mapping:
        raise SetupError(
            f"{key}: a critic is a model with a head of one number a token (AutoModelForTokenClassification), and "
            f"transformers has no parts for one of {config.model_type}; set critic.path to a model of another kind, or "
            "take an advantage without a critic"
        )
