"""The base of every config section."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Unknown keys are errors; sections do not change once made."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
