"""The base of every config section."""

import math
import re
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

MOST_PORT = 65535
NUMBERS = (int, float, int | None, float | None)
OWN = dict[str, Any]
"""What a field is that takes a map of the user's own."""


def check_bind(value: str, example: str) -> str:
    """``value`` itself. Raises `ValueError` where one cannot listen there, as at ``example``: ZeroMQ (``tcp://…``) at a
    host or on a network; HTTP at a host or, where none is named, everywhere."""
    scheme = "tcp://" if example.startswith("tcp://") else ""
    host = r"[^\s:/\[\]]+(/\d+)?" if scheme else r"[^\s:/\[\]]*"
    found = re.fullmatch(rf"{scheme}(\[[^\s/\[\]]+\]|{host}):(?P<port>\d{{1,5}})", value)
    if not found or int(found["port"]) > MOST_PORT:
        raise ValueError(f"{value!r} is nowhere to listen; give host and port, e.g. {example}")
    return value


class Section(BaseModel):
    """Unknown keys are errors; sections do not change once made."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_word_is_a_number(cls, data: Any) -> Any:
        """``yes`` and ``true`` are 1 to Python."""
        for name, value in data.items() if isinstance(data, dict) else ():
            if isinstance(value, bool) and name in cls.model_fields and cls.model_fields[name].annotation in NUMBERS:
                raise ValueError(f"{name}={str(value).lower()} is no number")
        return data

    @field_validator("*")
    @classmethod
    def _stays_what_it_is(cls, value: Any, info: ValidationInfo) -> Any:
        """In the run's own copy of the config, which its processes read."""
        if isinstance(value, dict) and cls.model_fields[info.field_name or ""].annotation == OWN:
            check_plain(value)
        return value


def check_plain(value: Any, at: str = "") -> None:
    """Raises `ValueError` where there is something in ``value``, a map of the user's own, that JSON does not have.
    ``at``: the keys that lead to it, each with a dot behind it."""
    if isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str):
                raise ValueError(f"the key {at}{key} is no text; put it in quotes")
            check_plain(each, f"{at}{key}.")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            check_plain(each, f"{at}{index}.")
    elif not isinstance(value, str | int | float | None) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{at[:-1]}={value} is neither text nor a finite number; put it in quotes")
