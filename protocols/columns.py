"""Columns: what scorers add to a finished group, a value for each trajectory or for each token; of a teacher, several
for each token that was sampled.

A rollout writes a group's tokens, loss mask, log-probabilities and versions; every scorer adds columns, each declared
once, with a name, a shape and a dtype. What a group needs before it may be trained on follows from the declarations.

>>> table = ColumnTable(
...     columns=(Column(name="reward/exact", scorer="reward", nullable=True),),
...     sums=(WeightedSum(name="reward", terms={"reward/exact": 2.0}),),
... )
>>> table.sums[0].of({"reward/exact": np.array([1, np.nan], np.float32)})
array([ 2., nan], dtype=float32)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

REWARD = "reward"
"""The column that advantages are made of: float32, a value for each trajectory, NaN where there is none."""
AGENT = "agent/"
"""What names of metrics that agents and environments tell of a trajectory begin with."""
SOURCE = "source/"
"""What those of the prompts of one source begin with."""
VALUES = "values"
"""The critic's: what rewards are still to come where each token was chosen; float32, a value for each token, 0 where
nothing was sampled."""
PROCESS = "process"
"""PRIME's: what each token was worth, by a model that knows outcomes alone; float32, a value for each token, 0 where
nothing was sampled."""
OF_CRITIC = (VALUES, PROCESS)
"""What a critic may write: one of these."""
GREEDY = "greedy"
"""No column: what an advantage may be given for each trajectory, the reward of its group's greedy answer."""
BASELINE = "baseline"
"""No column: what an advantage may be given for each trajectory, the running mean reward of its role."""
PICKED = "picked"
"""No column: what a loss may be given for each token, 1 where it is one of those that it picks out of the update."""
UNDECIDED = "undecided"
"""No column: what masks the losses of tokens, 1 where the policy is among an update's most undecided."""
GOOD = "imitated"
"""No column: what a loss may be given for each trajectory, 1 where its reward is good enough to be imitated."""
LAGS = "lags"
"""No column: what a loss may be given for each token, how many versions behind the trainer's the one is that sampled
it."""
SAMPLED = "sampled"
"""No column: what an advantage may be given for each token, its log-probability under the policy that sampled it."""
POLICY = "policy"
"""No column: what an advantage may be given for each token, its log-probability under the policy of the step's start,
which is computed for it, as are `SQUARES` and `WEIGHTS`."""
SQUARES = "squares"
"""No column: the sum of all squared probabilities where the token was chosen, under the same policy."""
TAUGHT = "taught"
"""No column: what an advantage may be given for each token, its log-probability under the same policy where that has
seen a good answer first; its own where there is none to be seen."""
STATES = "states"
"""No column: what an advantage may be given for each sampled token, a fingerprint of what its turn answers."""
SCORES, SESSIONS = "scores", "sessions"
"""No columns: what an advantage of tokens may be given for each trajectory, its whole reward, and a number that
branches of one session have in common."""
WEIGHTS = "weights"
"""No column: the correction's weight of each token, not normalised; 1 without a correction."""
REFERENCE = "reference"
"""Log-probabilities under a frozen model: float32, a value for each token, 0 where nothing was sampled."""

GIVEN = frozenset(
    (
        GREEDY, BASELINE, PICKED, UNDECIDED, GOOD, LAGS, SAMPLED, POLICY, SQUARES, TAUGHT, STATES, SCORES, SESSIONS,
        WEIGHTS,
    )
)  # fmt: skip
"""Names of what is made for a built-in choice, which no column may have: it would be covered by it."""

METRICS = frozenset(
    (
        "kind", "step", "time", "max_lag", "train_s", "loss", "grad_norm", "lr", "skipped", "entropy", "reward_std",
        "reward_missing", "groups_without_variance", "tokens", "tokens_lagging", "lag_mean", "lag_max", "wait_s",
        "response_tokens", "finished_share", "groups_unreadable", "train_step_s", "publish_wait_s", "mismatch",
        "mismatch_bound", "gather_s", "digest_s", "leased", "waiting", "unscored", "ready", "groups_dropped",
        "rejected_tokens", "rejected_rows", "turns", "reward_greedy", "reward_kl", "kl_coefficient", "critic_loss",
        "critic_value_mean", "critic_return_mean", "critic_explained_variance", "critic_clip_fraction",
        "critic_grad_norm", "critic_skipped", "critic_lr", "critic_accuracy", "prompts_resting", "taught_rows",
        "taught_gain", "mfu",
        "trainer_tokens_per_s", "solved_all", "solved_none", "reward_shaped", "imitated_nll", "teacher_divergence",
        "given_nll", "given_tokens", "given_coefficient", "reward_given", "preferred_likelier", "preferred_margin",
    )
)  # fmt: skip
"""Names in the row of a step, which no column and no metric of the user's own may have: columns stand there too."""

FIELDS = frozenset(
    (
        "prompt", "response", "truth", "sample", "group", "source", "session", "finish", "version_min", "version_max",
        "metrics", "token_ids", "logprobs", "loss_mask", "versions", "failure", "parent",
    )
)  # fmt: skip
"""Names in the row of a trajectory, beside those that `METRICS` has too, which no column may have."""

Per = Literal["trajectory", "token"]
Dtype = Literal["float16", "float32", "float64", "int32", "int64", "uint8"]
_TOP = re.compile(r"(.+)\.top\d+_(ids|logs)")


class ColumnError(ValueError):
    """Values that are not what their column declares; says how."""


class Column(BaseModel):
    """One column, as whoever writes it declares it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(pattern=r"^[a-z_][a-z0-9_.-]*(/[A-Za-z0-9_.-]+)?$")
    scorer: str
    """The kind of actor that writes it."""
    per: Per | Literal["sampled"] = "trajectory"
    """``sampled``: for each token that the policy sampled, so that prompts cost nothing."""
    width: int = Field(1, ge=1)
    """Values of each, one after the other."""
    dtype: Dtype = "float32"
    nullable: bool = False
    """NaN is allowed: this trajectory has no value. Otherwise every number is finite."""
    reads: tuple[str, ...] = ()
    """Columns that its scorer is given with the group, and waits for."""
    evaluated: bool = False
    """Evaluation prompts have it too."""
    trained: bool = True
    """Training prompts have it; otherwise those of evaluations alone."""
    of_step: bool = False
    """A learner writes it once a step has taken the group, and the trainer waits for it; nobody waits for it before."""
    sources: tuple[str, ...] = ()
    """Of which sources' prompts it is asked: `experience.Prompt.source`, or the name of an evaluation set; empty: of
    all. A group of another source has no such column; where a table needs one, it is NaN."""
    source: str = ""
    """What computes it, for people: ``reward my_rewards:judge``, say."""

    def asked(self, source: str) -> bool:
        """Groups of this source have it."""
        return not self.sources or source in self.sources

    def size(self, trajectories: int, tokens: int, sampled: int) -> int:
        """Values of a group with so many trajectories, tokens and sampled tokens (of all trajectories together)."""
        return self.width * {"trajectory": trajectories, "token": tokens, "sampled": sampled}[self.per]

    def check(self, values: np.ndarray, trajectories: int, tokens: int, sampled: int | None = None) -> None:
        """Raises `ColumnError` where ``values`` are not this column of such a group, see `size`. Without ``sampled``
        any number of tokens up to ``tokens`` may have been."""
        self.check_values(values)
        if sampled is None:
            sampled = min(values.size // self.width, tokens)
        size = self.size(trajectories, tokens, sampled)
        if values.shape != (size,):
            each = {"sampled": "sampled token"}.get(self.per, self.per)
            raise ColumnError(
                f"column {self.name}: expected {self.dtype} [{size}] ({self.width if self.width > 1 else 'one'} a "
                f"{each}), got {values.dtype.name} {list(values.shape)}"
            )

    def check_values(self, values: np.ndarray) -> None:
        """Raises `ColumnError` where one of them is none that this column may have, or their dtype is another's."""
        if values.dtype.name != self.dtype:
            raise ColumnError(f"column {self.name}: expected {self.dtype}, got {values.dtype.name}")
        if values.dtype.kind == "i" and values.size and values.min() < 0:
            raise ColumnError(f"column {self.name}: {values.min()} is no token's id")
        if values.dtype.kind == "f" and not np.isfinite(values[~np.isnan(values)] if self.nullable else values).all():
            raise ColumnError(f"column {self.name}: infinite values" + ("" if self.nullable else ", or NaN"))


def top_columns(name: str, k: int, scorer: str, **more: Any) -> tuple[Column, Column]:
    """Of the teacher that the column ``name`` is of, for each sampled token: the ids of the ``k`` tokens that it finds
    likeliest there, int32 ``[sampled, k]``; and their log-probabilities with, last, that of all others together,
    float16 ``[sampled, k + 1]``. The names say ``k``: with another one a resumed run has other columns."""
    ids = Column(name=f"{name}.top{k}_ids", scorer=scorer, per="sampled", width=k, dtype="int32", **more)
    logs = Column(name=f"{name}.top{k}_logs", scorer=scorer, per="sampled", width=k + 1, dtype="float16", **more)
    return ids, logs


def top_values(name: str, k: int, ids: np.ndarray, logs: np.ndarray) -> dict[str, np.ndarray]:
    """Those of `top_columns`, flat: ``ids`` ``[sampled, k]``, ``logs`` ``[sampled, k + 1]``, of any dtype."""
    of_ids, of_logs = (column.name for column in top_columns(name, k, ""))
    logs_16 = np.maximum(logs, np.finfo(np.float16).min).astype(np.float16)
    return {of_ids: ids.astype(np.int32).reshape(-1), of_logs: logs_16.reshape(-1)}


def top_of(name: str) -> str | None:
    """Of which column's teacher ``name`` is one of `top_columns`; None of any other."""
    found = _TOP.fullmatch(name)
    return found[1] if found else None


class WeightedSum(BaseModel):
    """A column that is made of others, a value for each trajectory: the weighted sum of those that its group's source
    is asked for; NaN where one of them is. One with a value for each token counts by its trajectory's sum."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    terms: dict[str, float]
    """Column to weight."""
    weighed: tuple[str, ...] = ()
    """Terms that the advantage weighs itself, whatever their weight here."""

    def of(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """float32 ``[trajectories]``, from as many values of each term that was asked; ``columns`` has one or more."""
        total = sum(w * columns[name].astype(np.float64) for name, w in self.terms.items() if name in columns)
        return np.asarray(total, np.float32)


class ColumnTable(BaseModel):
    """Every column of a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    columns: tuple[Column, ...]
    sums: tuple[WeightedSum, ...] = ()

    @cached_property
    def by_name(self) -> dict[str, Column]:
        """The columns that scorers write."""
        return {column.name: column for column in self.columns}

    @cached_property
    def by_source(self) -> bool:
        """Some are asked of some sources alone."""
        return any(column.sources for column in self.columns)

    @property
    def trained_sums(self) -> tuple[WeightedSum, ...]:
        """Those that training groups have."""
        return tuple(total for total in self.sums if all(self.by_name[name].trained for name in total.terms))

    def judged(self, source: str, evaluated: bool = False) -> bool:
        """A prompt of this source, in training or ``evaluated``, has something with a weight that its sums are made of;
        what has none is only read."""
        return not self.by_source or all(
            any(total.terms[name] or name in total.weighed for name in self.asked_terms(total, source))
            for total in (self.sums if evaluated else self.trained_sums)
        )

    def asked_terms(self, total: WeightedSum, source: str) -> list[str]:
        """What ``total`` is made of for a prompt of this source."""
        return [term for term in total.terms if self.by_name[term].asked(source)]

    @property
    def by_token(self) -> set[str]:
        """Columns with a value for each token."""
        return {column.name for column in self.columns if column.per == "token"}

    @property
    def by_trajectory(self) -> set[str]:
        """Columns with a value for each trajectory, sums included."""
        return {column.name for column in self.columns if column.per == "trajectory"} | {s.name for s in self.sums}

    @property
    def tops(self) -> dict[str, tuple[Column, Column]]:
        """`top_columns`, by the column of their teacher."""
        found: dict[str, list[Column]] = {}
        for column in self.columns:
            if (teacher := top_of(column.name)) is not None:
                found.setdefault(teacher, []).append(column)
        return {teacher: (ids, logs) for teacher, (ids, logs) in found.items()}

    @property
    def scored(self) -> list[Column]:
        """What a group needs before a step may take it."""
        return [column for column in self.columns if column.trained and not column.of_step]

    @property
    def of_step(self) -> list[Column]:
        """What the trainer waits for once a step has taken its groups."""
        return [column for column in self.columns if column.of_step]

    @property
    def names(self) -> list[str]:
        """Every column that the trainer is given, sums included."""
        own = (column.name for column in self.columns if column.trained)
        return [*own, *(total.name for total in self.trained_sums)]

    @property
    def evaluated(self) -> list[Column]:
        """The columns that evaluation prompts have: those declared so, and what they read."""
        wanted = {column.name for column in self.columns if column.evaluated}
        while more := {r for name in wanted for r in self.by_name[name].reads if r in self.by_name} - wanted:
            wanted |= more
        return [column for column in self.columns if column.name in wanted]
