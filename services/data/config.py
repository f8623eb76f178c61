"""Config sections of the data sources."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from penstock.protocols.chat import as_template_kwargs
from penstock.services.data.template import a_template
from penstock.services.runtime.settings import Section


def _template_kwargs(value: dict[str, Any]) -> dict[str, Any]:
    return as_template_kwargs(value) or {}


class SortData(Section):
    """Procedural: ``sort hgbaf=`` is answered by ``abfgh``."""

    type: Literal["sort"] = "sort"
    size: int = Field(100_000, ge=1)
    """Number of prompts."""
    min_letters: int = Field(4, ge=1, le=10)
    """Letters of the shortest task, e.g. ``3``."""
    max_letters: int = Field(8, ge=1, le=10)
    """Letters of the longest task, e.g. ``10``."""
    seed: int = 0
    """Other seeds give other tasks."""

    @model_validator(mode="after")
    def _ordered(self) -> SortData:
        if self.min_letters > self.max_letters:
            raise ValueError(f"min_letters={self.min_letters} exceeds max_letters={self.max_letters}")
        return self


class HubData(Section):
    """A Hugging Face dataset by name, or local JSONL, JSON, CSV or parquet files. Needs ``penstock[data]``."""

    type: Literal["hub"] = "hub"
    path: str
    """A name on the hub, e.g. ``openai/gsm8k``, or with a revision ``openai/gsm8k@e53f048``; or ``json``, ``csv``,
    ``parquet`` together with `files`."""
    name: str | None = None
    """The hub dataset's configuration, e.g. ``main``; null: its only one."""
    files: list[str] = []
    """Local files, e.g. ``[rows.jsonl]``, or patterns of their names such as ``data/*.parquet``, read by the format
    that `path` names; looked for where you start from, then beside the config."""
    split: str = "train"
    """Part of the dataset, e.g. ``test``; of local files ``train``, or rows of it like ``train[:90%]``."""
    prompt_key: str = "prompt"
    """Column of the prompt, e.g. ``question``: text, or a list of chat messages."""
    truth_key: str | None = None
    """Column that the reward compares with, e.g. ``answer``, or a part of one that holds maps, e.g.
    ``reward_model.ground_truth``; null: the whole row."""
    source_key: str | None = None
    """Column that says of which source a row is, e.g. ``data_source``, for `sources` of reward functions and scorers;
    null: the rows of a mixture are of its sources, others of none. Weights of a mixture count by its own sources."""
    answer_key: str | None = None
    """Column of the row's own answer, for `rollout.given`, e.g. ``solution``: text, or a list of chat messages that go
    on from the prompt. The same as `prompt_key`: that column has whole conversations, of which the assistant's last
    message is the answer. null: none but the truth."""
    rejected_key: str | None = None
    """Column of an answer that the row's own is preferred to, for `rollout.given.rejected`, e.g. ``rejected``: text or
    messages, as `answer_key` has them; where that is `prompt_key`, a whole conversation too. null: none."""
    images_key: str | None = None
    """Column of the pictures that the prompt shows, e.g. ``images``: one or a list of them, each an image of a
    dataset, or the path of a file. ``<image>`` in the prompt's words is where each stands; without, they stand before
    the words. For models that see: docs/models.md. null: prompts are words alone."""
    max_pixels: int | None = Field(None, ge=1)
    """Pictures with more are made smaller, in their own proportions, e.g. ``1000000``: a picture's tokens grow with
    its pixels (Qwen2.5-VL: one for 784). null: each as large as it is."""
    min_pixels: int | None = Field(None, ge=1)
    """Pictures with fewer are made larger, e.g. ``65536``, so that small print can be read. null: none is."""
    tools_key: str | None = None
    """Column of the functions that the prompt tells of by the chat template, e.g. ``tools``: a list of JSON schemas, as
    OpenAI has them, or text that is JSON of one. For conversations with calls of tools, and for prompts whose answers
    are to call some; an environment's own take their place. null: none."""
    chat_template_kwargs_key: str | None = None
    """Column of what the chat template is told beside the row's messages, over `chat_template_kwargs`, e.g.
    ``chat_template_kwargs``: a map, or text that is JSON of one, as ``{"enable_thinking": false}``. null: none."""
    chat: bool = True
    """Render a text prompt as one user message through the tokenizer's chat template, where it has one."""
    chat_template_kwargs: dict[str, Any] = {}
    """What the chat template is told beside the messages of each row, over `model.chat_template_kwargs`, e.g.
    ``{enable_thinking: false}`` for a source whose questions need no thoughts of Qwen 3's."""
    system: str | None = None
    """System message before each prompt, e.g. ``Think step by step.``; null: none."""
    template: str | None = None
    """What stands around each prompt, of a chat around the user's last message, e.g.
    ``"{prompt} Answer with a number alone."``; only ``{prompt}`` is replaced. null: nothing."""
    limit: int | None = Field(None, ge=1)
    """Use so many rows from the start, e.g. ``1000``; null: all."""

    _around = field_validator("template")(a_template)
    _told = field_validator("chat_template_kwargs")(_template_kwargs)

    @model_validator(mode="after")
    def _some_size_is_left(self) -> HubData:
        if self.max_pixels and self.min_pixels and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels={self.min_pixels} is above max_pixels={self.max_pixels}; swap them")
        return self


class ReasoningGymData(Section):
    """Procedural tasks of reasoning-gym. Needs ``penstock[reasoning-gym]``."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    task: str
    """The task set's name, e.g. ``chain_sum``."""
    options: dict[str, Any] = {}
    """The task set's own settings, e.g. ``{max_terms: 3}``."""
    size: int = Field(10_000, ge=1)
    """Number of prompts."""
    seed: int = 0
    """Other seeds give other tasks, where they lie further apart than `size`: a task follows from the sum of seed and
    row. Evaluations draw other tasks than training by the same one; where a task set has few, some are in both."""
    chat: bool = False
    """Render a question as one user message through the tokenizer's chat template, where it has one, e.g. ``true`` for
    an instruct model. `penstock play` always asks so."""
    system: str | None = None
    """System message before each question, e.g. ``Think step by step.``; null: none."""
    suffix: str = ""
    """Text that is put behind each question, e.g. ``" Answer with a number."``; empty: none."""
    chat_template_kwargs: dict[str, Any] = {}
    """What the chat template is told beside each question, over `model.chat_template_kwargs`, e.g.
    ``{enable_thinking: false}`` for Qwen 3's."""

    _told = field_validator("chat_template_kwargs")(_template_kwargs)


class CustomData(Section):
    """A source of your own: ``module:function`` returning a sequence of ``penstock.Prompt``. See docs/extending.md."""

    type: Literal["custom"] = "custom"
    function: str
    """Where it is: module and function, e.g. ``my_data:load``."""
    options: dict[str, Any] = {}
    """What the function is called with, e.g. ``{folder: tasks}``."""
    template: str | None = None
    """What stands around each prompt, of a chat around the user's last message, e.g.
    ``"{prompt} Answer with a number alone."``; only ``{prompt}`` is replaced. null: nothing."""
    chat_template_kwargs: dict[str, Any] = {}
    """What the chat template is told beside the messages of each prompt, where that does not say it itself
    (``Prompt.chat_template_kwargs``), over `model.chat_template_kwargs`, e.g. ``{enable_thinking: false}``."""
    pictures: bool = False
    """Its prompts show pictures (``Prompt.pictures``), e.g. ``true``: engines must know before the first comes."""

    _around = field_validator("template")(a_template)
    _told = field_validator("chat_template_kwargs")(_template_kwargs)


class NumbersData(Section):
    """Nothing but numbers: for agents, environments and classes of tools that have tasks of their own, and take the
    row's number to choose one, so that a group has the same. ``penstock play`` does."""

    type: Literal["numbers"] = "numbers"
    size: int = Field(10_000, ge=1)
    """How many, e.g. ``500``: as many as the environment has tasks."""
    first: int = Field(0, ge=0)
    """The first one, e.g. ``500`` for tasks that are held out."""


OneSource = Annotated[SortData | HubData | ReasoningGymData | NumbersData | CustomData, Field(discriminator="type")]


class MixData(Section):
    """Several sources as one. Reward functions may ask for `source`, the name of the one that a prompt is from, or
    what its row says where that has a `source_key`; each has a reward curve of its own, ``source/NAME``."""

    type: Literal["mix"] = "mix"
    sources: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")], OneSource] = Field(min_length=1)
    """The sources by name, e.g. ``{sums: {type: hub, path: json, files: [sums.jsonl]}, words: {type: sort}}``."""
    weights: dict[str, Annotated[float, Field(gt=0)]] = {}
    """What share of the prompts each source has, e.g. ``{sums: 3, words: 1}``: three quarters and one; the rows of a
    source whose share is larger than its part of all rows come more often. Nothing: every row comes once."""

    @model_validator(mode="after")
    def _weighed(self) -> MixData:
        if self.weights and self.weights.keys() != self.sources.keys():
            odd = ", ".join(sorted(self.weights.keys() ^ self.sources.keys()))
            raise ValueError(f"weights: each of sources has one, and nothing else has; look at {odd}")
        return self

    @property
    def named_by_rows(self) -> set[str]:
        """The sources whose rows say themselves of which they are."""
        return {name for name, part in self.sources.items() if isinstance(part, HubData) and part.source_key}


DataConfig = Annotated[
    SortData | HubData | ReasoningGymData | NumbersData | CustomData | MixData, Field(discriminator="type")
]


def shows_pictures(config: DataConfig) -> bool:
    """Some prompts of the source may show pictures."""
    match config:
        case HubData():
            return config.images_key is not None
        case CustomData():
            return config.pictures
        case MixData():
            return any(map(shows_pictures, config.sources.values()))
    return False


def says_sources(data: DataConfig) -> bool:
    """Rows say by themselves of which source they are."""
    if isinstance(data, MixData):
        return bool(data.named_by_rows)
    return isinstance(data, CustomData) or (isinstance(data, HubData) and data.source_key is not None)
