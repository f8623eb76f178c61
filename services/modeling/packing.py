"""Trajectories to batches of rows for a forward pass. Trajectories of a group share their prompt: it is computed once.

    row:        p p p p a a a b b c c c c         prompt, then the responses of three trajectories
    position:   0 1 2 3 4 5 6 4 5 4 5 6 7
    attends to: the prompt, and earlier tokens of the same response

The numbers are those of three separate rows: a response never sees another. On a GPU, and wherever rows are long, such
rows follow each other in one, without padding, and attention is told where each begins (`attention.Segments`). Short
rows on a CPU lie below each other, and attention gets a dense mask: that is faster there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from penstock.protocols.experience import Trajectory
from penstock.services.modeling.attention import Segments
from penstock.services.modeling.candidates import Candidates
from penstock.services.modeling.filling import fill
from penstock.services.modeling.pinned import to_device
from penstock.services.modeling.routing import OPEN, as_given
from penstock.services.modeling.taught import Taught

MASKED_ROW_TOKENS = 1024
"""Longest row whose attention has a dense mask, which grows with the square."""
Layout = Literal["apart", "either", "packed", "whole"]
"""What a model takes: a row for each trajectory, padded; rows in which trajectories share a prompt, packed or with a
mask; the packed ones alone; these, though some layers read each trajectory with its prompt (`state_mixers`)."""


@dataclass(frozen=True)
class Shown:
    """The trajectories of a pass of which some show pictures, each by itself, and where in the rows their tokens
    are."""

    tokens: torch.Tensor
    """int64 ``[trajectories, longest]``, right-padded"""
    real: torch.Tensor
    """int64, the same shape: 1 where there is a token."""
    sampled: torch.Tensor
    """bool, the same shape"""
    pictures: tuple[tuple[bytes, ...], ...]
    """`Trajectory.pictures` of each."""
    member: torch.Tensor
    """int64 ``[rows, length]``: whose token that is, of those that share a prompt the first one's; -1: nobody's."""
    place: torch.Tensor
    """int64 ``[rows, length]``: which of that one's."""


@dataclass(frozen=True)
class Rows:
    """One forward pass. ``index[k]`` is the place, in the list they came from, of trajectory k of this pass."""

    index: tuple[int, ...]
    tokens: torch.Tensor
    """int64 ``[rows, length]``, right-padded"""
    positions: torch.Tensor
    """int64 ``[rows, length]``"""
    attention: torch.Tensor | Segments
    """int64 ``[rows, length]``, 1 for real tokens; where responses share a row, bool ``[rows, 1, length, length]``;
    where all lie in one row, what each token of that attends to."""
    mask: torch.Tensor
    """bool ``[trajectories, longest - 1]``: position t is True where token t + 1 of the trajectory was sampled."""
    places: torch.Tensor
    """int64 ``[sampled tokens]``: where in ``trajectories * (longest - 1)`` they are."""
    source: torch.Tensor
    """int64 ``[sampled tokens]``: where in ``rows * length`` each sampled token is predicted, in `mask`'s order."""
    host_source: np.ndarray
    """The same, where it can be read without waiting for a device."""
    target: torch.Tensor
    """int64 ``[sampled tokens]``: their ids."""
    candidates: Candidates | None = None
    """What the sampler chose each from, in `mask`'s order. None where nothing was recorded."""
    routing: np.ndarray | None = None
    """int16 ``[rows, length, layers, experts of a token]``, on the host: which experts the engine sent each token to,
    `routing.OPEN` where that is not known. None where nothing was recorded."""
    taught: Taught | None = None
    """What teachers say of each sampled token, in `mask`'s order. None where nobody compares."""
    shown: Shown | None = None
    """None: none shows anything."""

    def scatter(self, flat: torch.Tensor) -> torch.Tensor:
        """``flat`` float32 ``[sampled tokens]``, in `mask`'s order, as ``[trajectories, longest - 1]``; 0 elsewhere."""
        padded = torch.zeros(self.mask.numel(), dtype=torch.float32, device=flat.device)
        return padded.index_copy(0, self.places, flat).view(self.mask.shape)  # a mask's backward would ask the device

    def column(self, arrays: Sequence[np.ndarray]) -> torch.Tensor:
        """Per-token ``arrays`` (one ``[tokens]`` for each trajectory of the list) as ``[trajectories, longest - 1]``,
        aligned with `mask`; 0 where padded."""
        padded = np.zeros((len(self.index), self.mask.shape[1] + 1), arrays[self.index[0]].dtype)
        for k, index in enumerate(self.index):
            padded[k, : len(arrays[index])] = arrays[index]
        return to_device(torch.from_numpy(padded[:, 1:].copy()), self.mask.device)  # whole: else it is copied again


@dataclass(frozen=True)
class _Row:
    """One row: a prompt and the responses of some trajectories (by index)."""

    prompt: int
    """Length of the prompt; 0 for a trajectory that stands alone."""
    members: tuple[int, ...]
    length: int
    whole: int
    """Tokens of its members, each with the prompt."""


@dataclass(frozen=True)
class Pass:
    """A forward pass over some of ``trajectories`` that is not laid out yet, which takes memory and time: of several
    ranks each lays out its own."""

    trajectories: Sequence[Trajectory]
    drafts: tuple[_Row, ...]
    packed: bool
    """All lie in one row."""
    device: torch.device
    routed: bool
    at_end: torch.device
    """Where the places are in which tokens are predicted: ``device``, but of a model that lies on several."""

    @property
    def index(self) -> tuple[int, ...]:
        """See `Rows.index`."""
        return tuple(index for row in self.drafts for index in row.members)

    @property
    def predicted(self) -> int:
        """Sampled tokens, but those that nothing predicts."""
        return sum(int(np.count_nonzero(self.trajectories[index].loss_mask[1:] == 1)) for index in self.index)

    @property
    def real(self) -> int:
        """Tokens, without padding; a shared prompt's count once."""
        return sum(row.length for row in self.drafts)

    @property
    def pairs(self) -> int:
        """Of a token and one that it attends to, itself included."""
        total = 0
        for row in self.drafts:
            total += row.prompt * (row.prompt + 1) // 2
            for index in row.members:
                own = len(self.trajectories[index].tokens) - row.prompt
                total += own * row.prompt + own * (own + 1) // 2
        return total

    def rows(self) -> Rows:
        """What is computed with."""
        return (_pack if self.packed else _lay_out)(
            self.trajectories, list(self.drafts), (self.device, self.at_end), self.routed
        )  # fmt: skip


def plan_rows(*given: Any, **more: Any) -> Iterator[Rows]:
    """What `plan_passes` makes of the same, laid out."""
    return (each.rows() for each in plan_passes(*given, **more))


def plan_passes(
    trajectories: Sequence[Trajectory],
    groups: Sequence[int] | np.ndarray,
    token_budget: int,
    device: torch.device,
    layout: Layout = "either",
    routed: bool = False,
    ranks: int = 1,
    at_end: torch.device | None = None,
) -> Iterator[Pass]:
    """Cuts trajectories into passes of at most ``token_budget`` tokens, padding included (a longer one stands alone);
    of packed ones, if it can be, as many for each of ``ranks``.

    ``groups[i]`` is any number that is the same for trajectories of one prompt; these should be neighbours. ``routed``:
    with `Rows.routing`, of trajectories whose routing is of one model. ``at_end``: see `Pass.at_end`.
    """
    at_end = at_end or device
    longest = max((len(trajectory.tokens) for trajectory in trajectories), default=0)
    if layout in ("packed", "whole") or (layout == "either" and (device.type == "cuda" or longest > MASKED_ROW_TOKENS)):
        for drafts in _plan_packed(trajectories, groups, token_budget, routed, layout == "whole", ranks):
            yield Pass(trajectories, tuple(drafts), True, device, routed, at_end)
        return
    rows = _rows(trajectories, groups, min(token_budget, MASKED_ROW_TOKENS), layout == "either", routed)
    rows.sort(key=lambda row: (len(row.members) == 1, -row.length, row.members))
    start = 0
    while start < len(rows):
        length, alone = rows[start].length, len(rows[start].members) == 1
        end = start + 1
        while end < len(rows) and (end + 1 - start) * length <= token_budget and (len(rows[end].members) == 1) == alone:
            end += 1
        yield Pass(trajectories, tuple(rows[start:end]), False, device, routed, at_end)
        start = end


def _plan_packed(
    trajectories: Sequence[Trajectory], groups: Sequence[int] | np.ndarray, token_budget: int, routed: bool,
    whole: bool, ranks: int,
) -> Iterator[list[_Row]]:  # fmt: skip
    rows = _rows(trajectories, groups, token_budget, True, routed, whole)
    for together in fill([row.whole if whole else row.length for row in rows], token_budget, ranks):
        yield [rows[number] for number in together]


def _rows(
    trajectories: Sequence[Trajectory],
    groups: Sequence[int] | np.ndarray,
    limit: int,
    share: bool,
    routed: bool,
    whole: bool = False,
) -> list[_Row]:
    """Each of at most ``limit`` tokens, where it has several members; of members that count ``whole``, of so many."""
    rows: list[_Row] = []
    for index, trajectory in enumerate(trajectories):
        size = len(trajectory.tokens)
        prompt = _prompt_length(trajectory)
        last = rows[-1] if rows and share else None
        grown = 0 if not last else last.whole + size if whole else last.length + size - prompt
        if last and groups[last.members[0]] == groups[index] and grown <= limit:
            first = trajectories[last.members[0]]
            if last.prompt == prompt and _same_prompt(first, trajectory, prompt, routed):
                members = (*last.members, index)
                rows[-1] = _Row(prompt, members, last.length + size - prompt, last.whole + size)
                continue
        rows.append(_Row(prompt, (index,), size, size))
    return rows


def _same_prompt(one: Trajectory, other: Trajectory, size: int, routed: bool) -> bool:
    """Their first ``size`` tokens give the same keys and values: where they are ``routed``, also by their experts, and
    where they show pictures by the same ones, of which it is not asked here which stand in the prompt."""
    alike = np.array_equal(one.tokens[:size], other.tokens[:size]) and one.pictures == other.pictures
    return alike and (not routed or np.array_equal(one.routing[:size], other.routing[:size]))


def _prompt_length(trajectory: Trajectory) -> int:
    """Tokens before the first sampled one."""
    sampled = np.flatnonzero(trajectory.loss_mask)
    return int(sampled[0]) if sampled.size else len(trajectory.tokens)


class _Draft:
    """Rows as they are written: prompts and responses, wherever each begins."""

    def __init__(
        self, trajectories: Sequence[Trajectory], members: list[int], shape: tuple[int, int], routed: bool
    ) -> None:
        self._trajectories, self._members, self._routed = trajectories, members, routed
        self._tokens, self._positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._member = np.full(shape, -1, np.int64)
        self._mask = np.zeros((len(members), max(len(trajectories[index].tokens) for index in members)), bool)
        self._source: list[np.ndarray] = []
        self._target: list[np.ndarray] = []
        self._routing: np.ndarray | None = None

    def prompt(self, r: int, at: int, trajectory: Trajectory, size: int) -> None:
        """The first ``size`` tokens of ``trajectory``, the next one of the members, in row ``r`` from ``at`` on."""
        self._tokens[r, at : at + size] = trajectory.tokens[:size]
        self._positions[r, at : at + size] = np.arange(size)
        self._member[r, at : at + size] = len(self._source)
        self._route(r, at, trajectory.routing[:size])

    def response(self, r: int, at: int, trajectory: Trajectory, prompt: int, prompt_at: int) -> int:
        """What follows a prompt of ``prompt`` tokens that lies at ``prompt_at``. Returns where it ends. To be called in
        the order of the members."""
        size = len(trajectory.tokens)
        end = at + size - prompt
        self._tokens[r, at:end] = trajectory.tokens[prompt:]
        self._positions[r, at:end] = np.arange(prompt, size)
        self._member[r, at:end] = len(self._source)
        self._route(r, at, trajectory.routing[prompt:])
        mask = self._mask[len(self._source)]
        mask[:size] = trajectory.loss_mask == 1
        sampled = np.flatnonzero(mask[1:]) + 1
        # A response's first token is predicted by the prompt's last, every other by the one before it.
        before = np.where(sampled == prompt, prompt_at + prompt - 1, at + sampled - prompt - 1)
        self._source.append(r * self._tokens.shape[1] + before)
        self._target.append(trajectory.tokens[sampled].astype(np.int64))
        return end

    def _route(self, r: int, at: int, routing: np.ndarray) -> None:
        """These experts, for the tokens of row ``r`` from ``at`` on."""
        if not self._routed or not routing.size:
            return
        if self._routing is None:
            self._routing = np.full((*self._tokens.shape, *routing.shape[1:]), OPEN, np.int16)
        self._routing[r, at : at + len(routing)] = as_given(routing)

    def finish(self, attention: torch.Tensor | Segments, device: torch.device, at_end: torch.device) -> Rows:
        """The rows, on ``device``; where tokens are predicted is ``at_end``."""
        if isinstance(attention, torch.Tensor):
            attention = to_device(attention, device)
        source, target = np.concatenate(self._source), np.concatenate(self._target)
        mask = self._mask[:, 1:].copy()
        tokens, positions = (to_device(torch.from_numpy(each), device) for each in (self._tokens, self._positions))
        parts = (mask, np.flatnonzero(mask), source, target)
        said, places, begins, ends = (to_device(torch.from_numpy(each), at_end) for each in parts)
        return Rows(
            tuple(self._members),
            tokens,
            positions,
            attention,
            said,
            places,
            begins,
            source,
            ends,
            Candidates.of([self._trajectories[index] for index in self._members], at_end),
            self._routing,
            shown=self._shown(device),
        )

    def _shown(self, device: torch.device) -> Shown | None:
        pictures = tuple(self._trajectories[index].pictures for index in self._members)
        if not any(pictures):
            return None
        tokens, real = np.zeros(self._mask.shape, np.int64), np.zeros(self._mask.shape, np.int64)
        for k, index in enumerate(self._members):
            size = len(self._trajectories[index].tokens)
            tokens[k, :size], real[k, :size] = self._trajectories[index].tokens, 1
        parts = (tokens, real, self._mask, self._member, self._positions)
        whole, there, sampled, member, place = (to_device(torch.from_numpy(each), device) for each in parts)
        return Shown(whole, there, sampled, pictures, member, place)


Devices = tuple[torch.device, torch.device]
"""`Pass.device` and `Pass.at_end`."""


def _lay_out(trajectories: Sequence[Trajectory], rows: list[_Row], devices: Devices, routed: bool) -> Rows:
    """``rows`` below each other, with a mask."""
    length = max(row.length for row in rows)
    members = [index for row in rows for index in row.members]
    draft = _Draft(trajectories, members, (len(rows), length), routed)
    segments = np.full((len(rows), length), -1, np.int64)
    for r, row in enumerate(rows):
        draft.prompt(r, 0, trajectories[row.members[0]], row.prompt)
        segments[r, : row.prompt] = 0
        at = row.prompt
        for segment, index in enumerate(row.members, 1):
            begin, at = at, draft.response(r, at, trajectories[index], row.prompt, 0)
            segments[r, begin:at] = segment
    if len(members) == len(rows):
        attention = (segments >= 0).astype(np.int64)
    else:
        same = (segments[:, None, :] == segments[:, :, None]) | (segments[:, None, :] == 0)
        attention = (same & np.tri(length, dtype=bool))[:, None]
    return draft.finish(torch.from_numpy(attention), *devices)


def _pack(trajectories: Sequence[Trajectory], rows: list[_Row], devices: Devices, routed: bool) -> Rows:
    """``rows`` one after the other in one, without a mask."""
    members = [index for row in rows for index in row.members]
    draft = _Draft(trajectories, members, (1, sum(row.length for row in rows)), routed)
    starts_q, starts_k, at = [0], [0], 0
    keys: list[np.ndarray] = []

    def segment(begin: int, end: int, before: range) -> None:
        if end > begin:
            starts_q.append(end)
            starts_k.append(starts_k[-1] + len(before) + end - begin)
            keys.extend((np.arange(before.start, before.stop), np.arange(begin, end)))

    for row in rows:
        prompt_at, alone = at, len(row.members) == 1
        draft.prompt(0, at, trajectories[row.members[0]], row.prompt)
        at += row.prompt
        if not alone:
            segment(prompt_at, at, range(0))
        for index in row.members:
            begin, at = at, draft.response(0, at, trajectories[index], row.prompt, prompt_at)
            segment(*((prompt_at, at, range(0)) if alone else (begin, at, range(prompt_at, prompt_at + row.prompt))))
    shared = None
    if starts_k != starts_q:
        shared = np.concatenate(keys)
    return draft.finish(Segments.of(starts_q, starts_k, shared, devices[0]), *devices)
