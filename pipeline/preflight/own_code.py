"""Code that comes with a model, where it is trained."""

from __future__ import annotations

from penstock.services.runtime.errors import SetupError


def check_own_code(path: str, learner: str, checkpoints: bool | str) -> None:
    """Raises `SetupError` where the code that came with the model cannot be called as others are, or does not do
    without activations."""
    from penstock.services.modeling.load import empty_model, has_own_code, load_config

    if has_own_code(load_config(path)):
        model = empty_model(path)
        if checkpoints and not model.supports_gradient_checkpointing:
            raise SetupError(
                f"{learner}.gradient_checkpointing: {path} has code of its own, and that of {type(model).__name__} has "
                "no such thing (supports_gradient_checkpointing); set it to false"
            )
