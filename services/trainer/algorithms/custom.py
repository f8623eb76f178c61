"""An advantage, a loss or a correction of the user's own, held to what it must return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from penstock.protocols.columns import METRICS, REWARD
from penstock.services.runtime.plugins import UserCodeError, load_plugin, user_code
from penstock.services.trainer.algorithm_config import CustomFunction

Place = Literal["advantage", "loss", "correction"]

WANTED = {
    "advantage": "an advantage a trajectory, [rows], or one a token, [rows, length]",
    "loss": "a loss a token, [rows, length]; trainer.algorithm.aggregation makes one number of them",
    "correction": "a weight a token, [rows, length]",
}


class CustomChoice:
    """Calls the function that ``choice`` of ``trainer.algorithm`` names: with the built-in ones' arguments, its columns
    and its options. Raises `UserCodeError` where it raises, or returns anything else than it must."""

    def __init__(self, config: CustomFunction, choice: Place) -> None:
        self._config, self._choice = config, choice
        self._key = f"trainer.algorithm.{choice}.function"
        self._where = f"{self._key}: {config.function}"
        self._function = load_plugin(config.function, self._key)

    def __call__(self, columns: Mapping[str, torch.Tensor], *arguments: Any) -> Any:
        read = {name.replace("/", "_"): columns[name] for name in self._config.columns}
        with user_code(self._key, self._config.function):
            found = self._function(*arguments, **read, **self._config.options)
        if self._choice == "advantage":
            mask = arguments[1]
            wanted = tuple(mask.shape) if getattr(found, "ndim", 0) == 2 else (len(mask),)
            return self._checked(found, wanted).reshape(len(mask), -1) * mask
        values, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        if not isinstance(metrics, dict):
            raise self._error(f"its metrics are a {type(metrics).__name__}, not a map of names to numbers")
        return self._checked(values, tuple(arguments[1].shape)), dict(map(self._metric, metrics.items()))

    def _metric(self, named: tuple[str, Any]) -> tuple[str, torch.Tensor]:
        name, value = named
        if name in METRICS or name == REWARD:
            raise UserCodeError(
                f"{self._where}: it returned a metric {name!r}, which every step has; name it otherwise"
            )
        try:
            return name, torch.as_tensor(value).detach().float().mean()
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserCodeError(f"{self._where}: its metric {name!r} is no number or tensor: {error}") from error

    def _checked(self, values: Any, shape: tuple[int, ...]) -> torch.Tensor:
        if not isinstance(values, torch.Tensor):
            raise self._error(f"it returned a {type(values).__name__}, not a tensor")
        if tuple(values.shape) != shape:
            kind = "a scalar" if values.ndim == 0 else f"shape {list(values.shape)}"
            raise self._error(f"it returned {kind}, and shape {list(shape)} is wanted")
        if not values.is_floating_point():
            raise self._error(f"it returned {values.dtype}, not floating-point numbers")
        return values

    def _error(self, what: str) -> UserCodeError:
        return UserCodeError(f"{self._where}: {what}: {WANTED[self._choice]}")
