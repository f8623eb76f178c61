"""The base of every config section."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

NUMBERS = (int, float, int | None, float | None)


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
