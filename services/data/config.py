"""Config sections of the data sources."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from penstock.services.runtime.settings import Section


class SortData(Section):
    """Procedural: ``sort hgbaf=`` is answered by ``abfgh``."""

    type: Literal["sort"] = "sort"
    size: int = Field(100_000, ge=1)
    """Number of prompts."""
    min_letters: int = Field(4, ge=1, le=10)
    max_letters: int = Field(8, ge=1, le=10)
    seed: int = 0

    @model_validator(mode="after")
    def _ordered(self) -> SortData:
        if self.min_letters > self.max_letters:
            raise ValueError(f"min_letters={self.min_letters} exceeds max_letters={self.max_letters}")
        return self


class HubData(Section):
    """A Hugging Face dataset by name, or local JSONL, JSON, CSV or parquet files. Needs ``penstock[data]``."""

    type: Literal["hub"] = "hub"
    path: str
    """A hub name such as ``openai/gsm8k``, or ``json``, ``csv``, ``parquet`` together with `files`."""
    name: str | None = None
    """The hub dataset's configuration, e.g. ``main``."""
    files: list[str] = []
    """Local files, read by the format that `path` names."""
    split: str = "train"
    prompt_key: str = "prompt"
    """Column of the prompt: text, or a list of chat messages."""
    truth_key: str | None = None
    """Column that the reward compares with; the whole row where not given."""
    chat: bool = True
    """Render a text prompt as one user message through the tokenizer's chat template, where it has one."""
    system: str | None = None
    """System message before each prompt."""
    limit: int | None = Field(None, ge=1)
    """Use the first rows only."""


class ReasoningGymData(Section):
    """Procedural tasks of reasoning-gym. Needs ``penstock[reasoning-gym]``."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    task: str
    """The task set's name, e.g. ``chain_sum``."""
    options: dict[str, Any] = {}
    """The task set's own settings."""
    size: int = Field(10_000, ge=1)
    seed: int = 0
    chat: bool = False
    system: str | None = None
    suffix: str = ""
    """Text after each question."""


class CustomData(Section):
    """A data source of your own: ``module:function`` returning a sequence of `protocols.experience.Prompt`."""

    type: Literal["custom"] = "custom"
    function: str
    options: dict[str, Any] = {}


DataConfig = Annotated[SortData | HubData | ReasoningGymData | CustomData, Field(discriminator="type")]
