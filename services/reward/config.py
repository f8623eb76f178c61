"""Config sections of the reward processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from penstock.protocols.columns import REWARD
from penstock.services.reward.truth import part_of
from penstock.services.runtime.settings import Section
from penstock.services.user_processes.worker import Program

_NAMES = (
    "choice", "code_tests", "exact_match", "f1", "judge", "length", "math_verify", "number", "overlong",
    "reasoning_gym", "regex", "repetition", "sandbox_tests",
)  # fmt: skip
REGISTRY = {name: f"penstock.services.reward.functions.{name}:{name}" for name in _NAMES}
"""Reward functions by name."""
COMPARING = {"choice", "code_tests", "exact_match", "f1", "math_verify", "number", "reasoning_gym", "sandbox_tests"}
"""Those that compare an answer with the truth."""
TESTING = {"code_tests", "sandbox_tests"}
"""Those that run an answer's program."""
ASKING = {"judge", "sandbox_tests"}
"""Those that ask a server, at their option `url`."""
OF_FORM = {"judge", "regex", "repetition"}
"""Those that judge all that the policy has said."""
ENVIRONMENT = "environment"
"""The reward that `rollout.environment` gave: nothing is called for it."""
TIMEOUT_S, TESTS_TIMEOUT_S = 10.0, 120.0
"""Of a call for which the config gives none; of one that runs many tests, each with seconds of its own."""
HANDLER = "penstock.services.reward.function:RewardFunction"
GROUP_HANDLER = "penstock.services.reward.function:GroupRewardFunction"

_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+$")]


class FunctionConfig(Section):
    """One reward function, plain or async: it returns a number, or several (`also`), and is given what it asks for by
    name, out of
    ``response``, ``response_tokens``, ``turns``, ``truth``, ``source``, ``prompt``, ``messages``, ``finish_reason``,
    ``group``, ``sample``, ``step``, ``pictures``, the columns below, and the options; or by verl's names
    ``solution_str``, ``ground_truth``, ``data_source``, ``extra_info``."""

    function: str = "exact_match"
    """A name of the registry (choice, code_tests, exact_match, f1, judge, length, math_verify, number, overlong,
    reasoning_gym, regex, repetition, sandbox_tests; see docs/scoring.md), ``environment`` for what
    `rollout.environment` gave, or ``module:function`` of your own, e.g. ``my_rewards:judge``."""
    name: _Name | None = None
    """What it is called in metrics and report: its column is ``reward/NAME``. null: the function's own name. Two
    entries with one function need names, e.g. ``strict``."""
    weight: float = 1.0
    """The reward is the sum of all functions, each times its weight. 0: only watched, e.g. a length."""
    also: dict[_Name, float] = {}
    """Further numbers that it returns beside its reward, each with its weight in the sum, e.g. ``{correct: 0, brief:
    0.1}``: it returns a dict with ``score``, which is its reward, and these; true counts as 1. Each is a column of its
    own, ``reward/NAME.correct``, as another function's would be."""
    sources: list[str] = []
    """Sources of prompts that it is asked for, e.g. ``[math, aime]``: names of `prompts.train.sources`, and of sets of
    `prompts.eval` (a row of a mixture there has its own source's). The reward of a prompt is the sum of the functions
    that are asked for its source. Empty: for all."""
    timeout_s: float | None = Field(None, gt=0)
    """Seconds. A call that takes longer is ended, and costs its trajectory the reward, e.g. ``60`` for a
    judge. null: 10; for code_tests and sandbox_tests 120, which bound all tests of an answer together, as their option
    `seconds` does each."""
    per_minute: float | None = Field(None, gt=0)
    """Calls that may begin in a minute, over all `reward.count` processes, e.g. ``300`` for a judge that answers no
    more; those that wait have not begun, and no deadline yet. null: any number."""
    columns: list[str] = []
    """Other columns that it reads, e.g. ``[reference]``: it is called once they are there, and given each as an
    argument of that name (``reward/exact_match`` as ``reward_exact_match``): the trajectory's number, or a float32
    array with one for each of its tokens."""
    truth_key: str | None = None
    """The part of the truth that it is given as ``truth``, where that is the whole row (`prompts.train.truth_key` null)
    or another map: a name in it, e.g. ``answer``, or one in a map there, e.g. ``reward_model.ground_truth``. null: all
    of it."""
    options: dict[str, Any] = {}
    """Arguments of your own that every call gets, e.g. ``{strict: true}``."""
    whole_group: bool = False
    """It is called once for all answers to a prompt, e.g. ``true`` for one that compares them: ``response``,
    ``finish_reason`` and all else that is of one answer are lists then, and so is what it returns: a number for each,
    or None where it has none. One that takes ``completions`` is called as TRL does it: with ``prompts`` and the row's
    columns, all of them lists."""
    branches: Literal["last", "each"] = "last"
    """Of an agent's session that has several branches: ``last`` judges where it came to, once, and all have that;
    ``each`` judges every one by its own end, and the session's reward is the mean, which punishes an agent for handing
    over, or for making its history shorter, where what it had come to by then is no answer."""
    last_turn: bool | None = None
    """Of a task of several turns ``response`` is the last alone, e.g. ``true``, and not all of them with what the
    environment said between them. null: so for the built-in functions that compare an answer with the truth, and for
    others all (but see `own_words`)."""
    own_words: bool | None = None
    """Of a task of several turns ``response`` is what the policy said, a blank line between its turns, e.g. ``true``,
    and nothing that the environment or a tool said. null: so for judge, regex and repetition, and for others not."""
    trial: bool = True
    """Call it before the run starts, on the first row, with its truth and with a made-up sentence as answers: one that
    fails on both ends the start. false: not, e.g. for one that raises where an answer is not JSON."""

    @field_validator("function")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in REGISTRY and value != ENVIRONMENT and value.count(":") != 1:
            names = ", ".join(sorted([*REGISTRY, ENVIRONMENT]))
            raise ValueError(f"{value!r} is neither module:function nor one of {names}")
        return value

    @model_validator(mode="after")
    def _reads_one_of_them(self) -> FunctionConfig:
        if self.last_turn and self.own_words:
            raise ValueError("last_turn and own_words: the response is one of them; take one out")
        return self

    @model_validator(mode="after")
    def _returns_several(self) -> FunctionConfig:
        if self.also and self.function == ENVIRONMENT:
            raise ValueError("also: what an environment gave is one number; take it out")
        if self.per_minute and self.function == ENVIRONMENT:
            raise ValueError("per_minute: nothing is called for what an environment gave; take it out")
        return self

    @property
    def call_s(self) -> float:
        """Seconds that a call may take."""
        return self.timeout_s or (TESTS_TIMEOUT_S if self.function in TESTING else TIMEOUT_S)

    @property
    def may_ask(self) -> bool:
        """It may ask a program beside the run."""
        return self.function in ASKING or self.function not in REGISTRY

    def program(self, key: str, processes: int = 1) -> Program:
        """For a worker; ``key`` is where it stands in the config. As many reward ``processes`` share its pace."""
        function = REGISTRY.get(self.function, self.function)
        columns = [name.replace("/", "_") for name in self.columns]
        handler = GROUP_HANDLER if self.whole_group else HANDLER
        pace = self.per_minute / processes if self.per_minute else None
        return Program(handler, function, key, self.call_s, self.options, columns, list(self.also), pace)

    def truth_of(self, truth: Any) -> Any:
        """Its part of a prompt's ``truth`` (`truth_key`); None where that has no such part."""
        return part_of(truth, self.truth_key) if self.truth_key else truth

    def response_of(self, text: str, turns: Sequence[str]) -> str:
        """What it is given of an answer with this ``text``, in which the policy said ``turns``."""
        if self.last_turn or (self.last_turn is None and not self.own_words and self.function in COMPARING):
            return turns[-1]
        own = self.function in OF_FORM and self.last_turn is None if self.own_words is None else self.own_words
        return "\n\n".join(turns) if own else text

    @property
    def column(self) -> str:
        """The column of its reward."""
        return f"{REWARD}/{self.name or self.function.rpartition(':')[2]}"

    @property
    def terms(self) -> dict[str, float]:
        """Every column that it writes, its reward's first, with its weight."""
        return {self.column: self.weight} | {f"{self.column}.{name}": weight for name, weight in self.also.items()}


class RewardConfig(Section):
    """The reward processes."""

    count: int = Field(1, ge=1)
    """Reward processes, e.g. ``2``."""
    functions: list[FunctionConfig] = Field([FunctionConfig()], min_length=1)
    """What makes the reward, e.g. ``[{function: exact_match}, {function: "my_rewards:brief", weight: 0.1}]``."""
    columns: dict[str, float] = {}
    """Columns of `scorers` that the reward is made of too, each times its weight: a reward model's, e.g.
    ``{preference: 1.0}``. One with a value for each token (a process reward) counts by its sum, and advantages that
    go by token see where it lies."""
    concurrency: int = Field(512, ge=1)
    """Calls that may be under way at once for each function in each reward process: all of an async one's run together;
    those of a plain one wait for a worker. A judge that answers 64 requests at a time wants ``64``."""
    workers: int | None = Field(None, ge=1)
    """Worker processes for each plain function, in each reward process. null: the machine's cores, less the threads of
    trainer, rollouts and critic, dealt out to `count` processes, at most 32; else e.g. ``4``. An async function has one
    process, whatever this is."""

    @property
    def reads_environment(self) -> bool:
        """What environments or agents say counts, or is watched."""
        return any(each.function == ENVIRONMENT for each in self.functions)

    @model_validator(mode="after")
    def _named_apart(self) -> RewardConfig:
        columns = [column for function in self.functions for column in function.terms]
        twice = sorted({column for column in columns if columns.count(column) > 1})
        if twice:
            raise ValueError(f"two functions write the column {twice[0]}; give each a name of its own")
        return self
