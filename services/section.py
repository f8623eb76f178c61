"""The base of every config section, and of every error that a better config would mend."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Unknown keys are errors; sections do not change once made."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class SetupError(ValueError):
    """The actor cannot work with what it was given: starting it again would not help."""
