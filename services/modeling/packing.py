"""Trajectories to batches of rows for a forward pass. Trajectories of a group share their prompt: it is computed once.

    row:        p p p p a a a b b c c c c         prompt, then the responses of three trajectories
    position:   0 1 2 3 4 5 6 4 5 4 5 6 7
    attends to: the prompt, and earlier tokens of the same response

The numbers are those of three separate rows: a response never sees another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.protocols.experience import Trajectory

SHARED_ROW_TOKENS = 1024
"""Longest row with several responses: its attention mask is dense, and grows with the square."""


@dataclass(frozen=True)
class Rows:
    """One forward pass. ``index[k]`` is the place, in the list they came from, of trajectory k of this pass."""

    index: tuple[int, ...]
    tokens: torch.Tensor
    """int64 ``[rows, length]``, right-padded"""
    positions: torch.Tensor
    """int64 ``[rows, length]``"""
    attention: torch.Tensor
    """int64 ``[rows, length]``, 1 for real tokens; where responses share a row, bool ``[rows, 1, length, length]``"""
    mask: torch.Tensor
    """bool ``[trajectories, longest - 1]``: position t is True where token t + 1 of the trajectory was sampled."""
    source: torch.Tensor
    """int64 ``[sampled tokens]``: where in ``rows * length`` each sampled token is predicted, in `mask`'s order."""
    target: torch.Tensor
    """int64 ``[sampled tokens]``: their ids."""
    candidates: torch.Tensor | None = None
    """int64 ``[sampled tokens, most candidates]``: what the sampler chose each from, padded with -1; a row of -1 alone:
    from all. None where nothing was recorded."""

    def column(self, arrays: Sequence[np.ndarray]) -> torch.Tensor:
        """Per-token ``arrays`` (one ``[tokens]`` for each trajectory of the list) as ``[trajectories, longest - 1]``,
        aligned with `mask`; 0 where padded."""
        padded = np.zeros((len(self.index), self.mask.shape[1] + 1), arrays[self.index[0]].dtype)
        for k, index in enumerate(self.index):
            padded[k, : len(arrays[index])] = arrays[index]
        return torch.from_numpy(padded[:, 1:]).to(self.tokens.device)


@dataclass(frozen=True)
class _Row:
    """One row: a prompt and the responses of some trajectories (by index)."""

    prompt: int
    """Length of the prompt; 0 for a trajectory that stands alone."""
    members: tuple[int, ...]
    length: int


def plan_rows(
    trajectories: Sequence[Trajectory],
    groups: Sequence[int] | np.ndarray,
    token_budget: int,
    device: torch.device,
    share_prompts: bool = True,
) -> Iterator[Rows]:
    """Cuts trajectories into passes of at most ``token_budget`` padded tokens (a longer one stands alone).

    ``groups[i]`` is any number that is the same for trajectories of one prompt; these should be neighbours.
    """
    rows = _rows(trajectories, groups, min(token_budget, SHARED_ROW_TOKENS), share_prompts)
    rows.sort(key=lambda row: (len(row.members) == 1, -row.length, row.members))
    start = 0
    while start < len(rows):
        length, alone = rows[start].length, len(rows[start].members) == 1
        end = start + 1
        while end < len(rows) and (end + 1 - start) * length <= token_budget and (len(rows[end].members) == 1) == alone:
            end += 1
        yield _lay_out(trajectories, rows[start:end], device)
        start = end


def _rows(
    trajectories: Sequence[Trajectory], groups: Sequence[int] | np.ndarray, limit: int, share: bool
) -> list[_Row]:
    rows: list[_Row] = []
    for index, trajectory in enumerate(trajectories):
        size = len(trajectory.tokens)
        prompt = _prompt_length(trajectory)
        last = rows[-1] if rows and share else None
        if last and groups[last.members[0]] == groups[index] and last.length + size - prompt <= limit:
            first = trajectories[last.members[0]]
            if last.prompt == prompt and np.array_equal(first.tokens[:prompt], trajectory.tokens[:prompt]):
                rows[-1] = _Row(prompt, (*last.members, index), last.length + size - prompt)
                continue
        rows.append(_Row(prompt, (index,), size))
    return rows


def _prompt_length(trajectory: Trajectory) -> int:
    """Tokens before the first sampled one."""
    sampled = np.flatnonzero(trajectory.loss_mask)
    return int(sampled[0]) if sampled.size else len(trajectory.tokens)


def _lay_out(trajectories: Sequence[Trajectory], rows: list[_Row], device: torch.device) -> Rows:
    length = max(row.length for row in rows)
    members = [index for row in rows for index in row.members]
    longest = max(len(trajectories[index].tokens) for index in members)
    tokens = np.zeros((len(rows), length), np.int64)
    positions = np.zeros((len(rows), length), np.int64)
    segments = np.full((len(rows), length), -1, np.int64)
    mask = np.zeros((len(members), longest), bool)
    source: list[np.ndarray] = []
    target: list[np.ndarray] = []
    k = 0
    for r, row in enumerate(rows):
        first = trajectories[row.members[0]]
        tokens[r, : row.prompt] = first.tokens[: row.prompt]
        positions[r, : row.prompt] = np.arange(row.prompt)
        segments[r, : row.prompt] = 0
        at = row.prompt
        for segment, index in enumerate(row.members, 1):
            trajectory = trajectories[index]
            size = len(trajectory.tokens)
            end = at + size - row.prompt
            tokens[r, at:end] = trajectory.tokens[row.prompt :]
            positions[r, at:end] = np.arange(row.prompt, size)
            segments[r, at:end] = segment
            mask[k, :size] = trajectory.loss_mask == 1
            sampled = np.flatnonzero(mask[k, 1:]) + 1
            # A response's first token is predicted by the prompt's last, every other by the one before it.
            before = np.where(sampled == row.prompt, row.prompt - 1, at + sampled - row.prompt - 1)
            source.append(r * length + before)
            target.append(trajectory.tokens[sampled].astype(np.int64))
            at, k = end, k + 1
    if all(len(row.members) == 1 for row in rows):
        attention = (segments >= 0).astype(np.int64)
    else:
        same = (segments[:, None, :] == segments[:, :, None]) | (segments[:, None, :] == 0)
        attention = (same & np.tri(length, dtype=bool))[:, None]
    return Rows(
        tuple(members),
        torch.from_numpy(tokens).to(device),
        torch.from_numpy(positions).to(device),
        torch.from_numpy(attention).to(device),
        torch.from_numpy(mask[:, 1:].copy()).to(device),
        torch.from_numpy(np.concatenate(source)).to(device),
        torch.from_numpy(np.concatenate(target)).to(device),
        _candidates([trajectories[index] for index in members], device),
    )


def _candidates(trajectories: Sequence[Trajectory], device: torch.device) -> torch.Tensor | None:
    """`Rows.candidates`, over the sampled tokens of ``trajectories`` in order."""
    if not any(t.candidate_ids.size for t in trajectories):
        return None
    counts, ids = [], []
    for t in trajectories:  # a trajectory's first token is predicted by nothing
        sampled = np.flatnonzero(t.loss_mask[1:]) + 1
        noted = t.candidate_counts if t.candidate_counts.size else np.zeros(len(t.tokens), np.int32)
        counts.append(noted[sampled])
        ids.append(t.candidate_ids[noted[0] :])
    count = np.concatenate(counts)
    table = np.full((len(count), int(count.max(initial=1))), -1, np.int64)
    table[np.arange(table.shape[1]) < count[:, None]] = np.concatenate(ids)
    return torch.from_numpy(table).to(device)
