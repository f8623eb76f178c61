"""A taken batch as trajectories and columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import structlog
import torch

from penstock.protocols.columns import REWARD, Column, ColumnError, ColumnTable
from penstock.protocols.experience import ExperienceError, Group, Prompt, Trajectory, mean_by_session, sessions_of
from penstock.protocols.messages import Batch, TakenGroup
from penstock.protocols.packed_groups import unpack_group
from penstock.protocols.routing import Mixture
from penstock.protocols.wire import WireError

log = structlog.get_logger()


class BatchError(ValueError):
    """A batch that breaks a promise: a token older than the bound, or from a version that does not exist yet."""


@dataclass(frozen=True)
class TrainingBatch:
    """What one step trains on. Lists are over trajectories, in the order of the ledger."""

    trajectories: list[Trajectory]
    groups: np.ndarray
    """int64 ``[trajectories]``: the number of its group."""
    sessions: np.ndarray
    """int64 ``[trajectories]``, from 0: branches of one agent's session have the same; any other has its own."""
    values: dict[str, np.ndarray]
    """Columns with a value for each trajectory: ``[trajectories]``."""
    token_values: dict[str, list[np.ndarray]]
    """Columns with a value for each token: ``[tokens]`` for each trajectory."""
    unreadable: int = 0
    """Groups that could not be read: they have no part in the step."""
    placed: list[np.ndarray] | None = None
    """float64 ``[tokens]`` for each trajectory: where in it parts of its reward lie; None where all of it is on the
    last token."""
    prompts: tuple[Prompt, ...] = ()
    """What each trajectory answers; empty: nobody asks."""
    greedy: np.ndarray | None = None
    """float32 ``[trajectories]``: the reward of its group's greedy answer, which itself is none of them; NaN where that
    has none; None where groups have no such answer."""
    tops: dict[str, list[tuple[np.ndarray, np.ndarray]]] = field(default_factory=dict)
    """Of each teacher that says so, by its column, for each trajectory: which tokens it finds likeliest where each
    token was sampled, and their log-probabilities, as `columns.top_columns` have them; NaN where it was not asked."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Which source of a mixture each trajectory's prompt is from; empty: there is no mixture."""
        return tuple(p.source for p in self.prompts) if any(p.source for p in self.prompts) else ()

    @property
    def given(self) -> np.ndarray:
        """bool ``[trajectories]``: those that are their row's own answer."""
        return np.array([trajectory.given for trajectory in self.trajectories], bool)

    def only(self, kept: np.ndarray) -> TrainingBatch:
        """Of these trajectories, by their places, ascending."""
        return replace(
            self,
            trajectories=[self.trajectories[i] for i in kept],
            groups=self.groups[kept],
            sessions=np.unique(self.sessions[kept], return_inverse=True)[1],
            values={name: column[kept] for name, column in self.values.items()},
            token_values={name: [parts[i] for i in kept] for name, parts in self.token_values.items()},
            placed=None if self.placed is None else [self.placed[i] for i in kept],
            prompts=tuple(self.prompts[i] for i in kept) if self.prompts else (),
            greedy=None if self.greedy is None else self.greedy[kept],
            tops={name: [parts[i] for i in kept] for name, parts in self.tops.items()},
        )

    @property
    def rewards(self) -> np.ndarray:
        """float32 ``[trajectories]``; NaN where the reward failed, or none was asked for: such a one has no part in its
        group's advantage."""
        return self.values[REWARD]

    @property
    def rewarded(self) -> np.ndarray:
        """bool ``[trajectories]``"""
        return np.isfinite(self.rewards)

    def padded(self, parts: Sequence[np.ndarray], rows: Sequence[int] | np.ndarray) -> torch.Tensor:
        """``parts``, an array ``[tokens]`` for each trajectory, as ``[rows, longest]`` on the host, padded with 0."""
        mine = [parts[row] for row in rows]
        dtype = mine[0].dtype if mine else np.dtype(np.float32)
        found = np.zeros((len(mine), max(map(len, mine), default=0)), dtype)
        for row, values in enumerate(mine):
            found[row, : len(values)] = values
        return torch.from_numpy(found)

    def column(self, name: str, rows: np.ndarray, by_token: bool = True) -> torch.Tensor:
        """``[rows, longest]``, or, of a column without tokens or not ``by_token``, ``[rows]``; on the host."""
        if by_token and name in self.token_values:
            return self.padded(self.token_values[name], rows)
        return torch.from_numpy(self.values[name][rows])

    def left_alone(self, rows: np.ndarray) -> np.ndarray:
        """bool ``[rows]``: of these those whose group had others, none of which is among them: there is nobody left to
        compare them with. An agent's session counts once."""

        def members(of: np.ndarray) -> dict[int, int]:
            pairs = np.unique(np.stack([self.groups[of], self.sessions[of]]), axis=1)
            return dict(zip(*np.unique(pairs[0], return_counts=True), strict=True))

        every, here = members(np.arange(len(self.groups))), members(rows)
        return np.array([here[group] == 1 < every[group] for group in self.groups[rows]], bool)

    def with_tokens(self, name: str, parts: list[np.ndarray]) -> TrainingBatch:
        """With one more column, an array ``[tokens]`` for each trajectory."""
        return replace(self, token_values={**self.token_values, name: parts})

    def lags(self, version: int) -> np.ndarray:
        """int32 ``[sampled tokens]``: how many versions each sampled token is behind ``version``."""
        sampled = [t.versions[t.loss_mask == 1] for t in self.trajectories]
        return version - (np.concatenate(sampled) if sampled else np.zeros(0, np.int32))


def open_batch(
    batch: Batch, table: ColumnTable, mixture: Mixture | None = None, vocabulary: int | None = None
) -> TrainingBatch:
    """Unpacks and checks ``batch``, for a model that replays the routing of ``mixture`` and has a ``vocabulary`` of so
    many tokens. A group that cannot be read costs itself alone. Raises `BatchError`."""
    groups: list[tuple[TakenGroup, Group]] = []
    table = _written(batch, table)
    terms = next((total.terms for total in table.sums if total.name == REWARD), {})
    for taken in batch.groups:
        try:
            groups.append(_open_group(taken, table, mixture, vocabulary))
        except (ExperienceError, WireError, ColumnError) as error:
            log.error("a group is left out of its step", step=batch.step, group=taken.number, error=str(error))
    trajectories = [trajectory for _, group in groups for trajectory in group.trajectories]
    per = {name: column.per for name, column in table.by_name.items()} | {s.name: "trajectory" for s in table.sums}
    step = TrainingBatch(
        trajectories,
        np.array([taken.number for taken, group in groups for _ in group.trajectories], np.int64),
        _sessions([group for _, group in groups]),
        {name: _joined(name, groups) for name in table.names if per[name] == "trajectory"},
        {name: _split(name, groups) for name in table.names if per[name] == "token"},
        len(batch.groups) - len(groups),
        prompts=tuple(group.prompt for _, group in groups for _ in group.trajectories),
        tops={name: _tops(ids, logs, groups) for name, (ids, logs) in table.tops.items()},
    )
    step.values.setdefault(REWARD, of_pairs(trajectories))  # where nobody asks for one
    of_tokens = {table.by_name[name]: weight for name, weight in terms.items() if per[name] == "token"}
    step = _without_greedy(_with_placed(step, of_tokens))
    lags = step.lags(batch.step)
    if lags.size and not 0 <= lags.min() <= lags.max() <= batch.max_lag:
        raise BatchError(f"step {batch.step}: lags from {lags.min()} to {lags.max()}, bound {batch.max_lag}")
    return step


def of_pairs(trajectories: list[Trajectory]) -> np.ndarray:
    """float32 ``[trajectories]``: `Trajectory.preference`, NaN where there is none."""
    worth = (trajectory.preference for trajectory in trajectories)
    return np.array([np.nan if each is None else each for each in worth], np.float32)


def _with_placed(step: TrainingBatch, terms: dict[Column, float]) -> TrainingBatch:
    """With the reward's ``terms`` that have a value for each token, and their sums as values of trajectories. What a
    prompt's source is not asked for places nothing."""
    if not terms:
        return step
    placed = []
    for i, (prompt, trajectory) in enumerate(zip(step.prompts, step.trajectories, strict=True)):
        asked = {column.name: weight for column, weight in terms.items() if column.asked(prompt.source)}
        parts = [weight * step.token_values[name][i].astype(np.float64) for name, weight in asked.items()]
        placed.append(np.asarray(sum(parts)) if parts else np.zeros(len(trajectory.tokens)))
    sums = {c.name: np.array([part.sum() for part in step.token_values[c.name]], np.float32) for c in terms}
    return replace(step, placed=placed, values={**step.values, **sums})


def _without_greedy(step: TrainingBatch) -> TrainingBatch:
    """Greedy answers are what others are compared with. Whose group's has no reward has none either."""
    is_greedy = np.array([t.greedy for t in step.trajectories], bool)
    if not is_greedy.any():
        return step
    kept = np.flatnonzero(~is_greedy)
    numbers, places = np.unique(step.groups[is_greedy], return_inverse=True)  # a group has one, an agent's branches
    found = dict(zip(numbers.tolist(), mean_by_session(step.rewards[is_greedy], places).tolist(), strict=True))
    greedy = np.array([found.get(number, np.nan) for number in step.groups[kept].tolist()], np.float32)
    others = step.only(kept)
    rewards = np.where(np.isnan(greedy), np.float32(np.nan), others.rewards)
    return replace(others, values=others.values | {REWARD: rewards}, greedy=greedy)


def _written(batch: Batch, table: ColumnTable) -> ColumnTable:
    """Without the columns of evaluations alone, and those of steps that no group of ``batch`` has yet."""
    there = {name for taken in batch.groups for name in taken.columns}
    own = (column for column in table.columns if column.trained and (not column.of_step or column.name in there))
    return ColumnTable(columns=tuple(own), sums=table.trained_sums)


def _open_group(
    taken: TakenGroup, table: ColumnTable, mixture: Mixture | None, vocabulary: int | None
) -> tuple[TakenGroup, Group]:
    """The group, and what it was read from with all columns: NaN in those that its source is not asked for."""
    group = unpack_group(taken.experience.data)
    if vocabulary is not None:
        group.check_ids(vocabulary)
    if mixture:
        for trajectory in group.trajectories:
            if fault := mixture.fault(trajectory.routing):
                raise ExperienceError(fault)
    unasked = {column.name for column in table.columns if not column.asked(group.prompt.source)}
    if missing := [name for name in table.names if name not in taken.columns and name not in unasked]:
        raise ColumnError(f"group {taken.number} came without {', '.join(missing)}")
    sizes = len(group.trajectories), sum(len(t.tokens) for t in group.trajectories), group.sampled
    filled = dict(taken.columns)
    for name, column in table.by_name.items():
        if name not in unasked:
            column.check(filled[name], *sizes)
            continue
        filled[name] = np.zeros(column.size(*sizes), column.dtype)
        if filled[name].dtype.kind == "f":
            filled[name][:] = np.nan
    return taken.model_copy(update={"columns": filled}), group


def _sessions(groups: list[Group]) -> np.ndarray:
    parts, begun = [np.zeros(0, np.int64)], 0
    for group in groups:
        parts.append(sessions_of([t.session for t in group.trajectories]) + begun)
        begun = int(parts[-1].max()) + 1
    return np.concatenate(parts)


def _joined(name: str, groups: list[tuple[TakenGroup, Group]]) -> np.ndarray:
    parts = [taken.columns[name] for taken, _ in groups]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def _split(name: str, groups: list[tuple[TakenGroup, Group]]) -> list[np.ndarray]:
    parts: list[np.ndarray] = []
    for taken, group in groups:
        bounds = np.cumsum([len(t.tokens) for t in group.trajectories])
        parts += np.split(taken.columns[name], bounds[:-1])
    return parts


def _tops(ids: Column, logs: Column, groups: list[tuple[TakenGroup, Group]]) -> list[tuple[np.ndarray, np.ndarray]]:
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    for taken, group in groups:
        bounds = np.cumsum([t.sampled for t in group.trajectories])[:-1]
        each = (np.split(taken.columns[c.name].reshape(-1, c.width), bounds) for c in (ids, logs))
        parts += zip(*each, strict=True)
    return parts
