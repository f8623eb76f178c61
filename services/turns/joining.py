"""Turns and what stands between them, joined to a trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from penstock.protocols import routing as routes
from penstock.protocols.experience import UNSAMPLED, ExperienceError, Finish, Trajectory, no_candidates, no_rewards


class Sampled(Protocol):
    """What a policy said: see `experience.Trajectory` for each of the arrays, all ``[tokens]`` but ``routing``, which
    is of these and of as many tokens before them as it has more."""

    @property
    def tokens(self) -> np.ndarray: ...
    @property
    def logprobs(self) -> np.ndarray: ...
    @property
    def versions(self) -> np.ndarray: ...
    @property
    def candidate_counts(self) -> np.ndarray: ...
    @property
    def candidate_ids(self) -> np.ndarray: ...
    @property
    def routing(self) -> np.ndarray: ...


@dataclass(frozen=True)
class Again:
    """What a policy said, where another trajectory is trained on it."""

    said: Sampled


Part = np.ndarray | Sampled | Again


def join(
    parts: Sequence[Part],
    text: str,
    finish: Finish,
    rewards: np.ndarray | None = None,
    turns: tuple[str, ...] = (),
    failure: str = "",
    greedy: bool = False,
    given: bool = False,
    pictures: tuple[bytes, ...] = (),
) -> Trajectory:
    """A trajectory of ``parts``, one behind the other: int32 arrays of tokens that were not sampled, and what the
    policy said, or was ``given`` to say. ``pictures``: see `Trajectory`."""
    sampled = [None if isinstance(part, np.ndarray | Again) else part for part in parts]
    tokens = [_tokens(part) for part in parts]
    candidates = any(said is not None and said.candidate_counts.size for said in sampled)
    columns: dict[str, list[np.ndarray]] = {name: [] for name in ("mask", "logprobs", "versions", "counts")}
    for said, size in zip(sampled, map(len, tokens), strict=True):
        columns["mask"].append(np.full(size, said is not None, np.uint8))
        columns["logprobs"].append(np.zeros(size) if said is None else np.minimum(said.logprobs, 0))
        columns["versions"].append(np.full(size, UNSAMPLED) if said is None else said.versions)
        counted = said is not None and said.candidate_counts.size
        columns["counts"].append(said.candidate_counts if said is not None and counted else np.zeros(size))
    ids = [said.candidate_ids for said in sampled if said is not None]
    return Trajectory(
        tokens=np.concatenate(tokens).astype(np.int32),
        loss_mask=np.concatenate(columns["mask"]),
        logprobs=np.concatenate(columns["logprobs"]).astype(np.float32),
        versions=np.concatenate(columns["versions"]).astype(np.int32),
        text=text,
        finish=finish,
        candidate_counts=np.concatenate(columns["counts"]).astype(np.int32) if candidates else no_candidates(),
        candidate_ids=np.concatenate(ids).astype(np.int32) if candidates else no_candidates(),
        rewards=no_rewards() if rewards is None else rewards,
        turns=turns,
        failure=failure,
        greedy=greedy,
        given=given,
        routing=_routing(parts),
        pictures=pictures,
    )


def placed(parts: Sequence[Part], rewards: Sequence[float]) -> np.ndarray:
    """`Trajectory.rewards` of ``parts``: each of ``rewards`` on the last token of a turn that is trained on here, in
    their order. Turns beyond them have none."""
    found, left = [], list(rewards)
    for part in parts:
        values = np.zeros(len(_tokens(part)), np.float32)
        if left and not isinstance(part, np.ndarray | Again):
            values[-1] = left.pop(0)
        found.append(values)
    return np.concatenate(found)


def routed_before(prompt: int, given: int) -> int:
    """Of a turn's ``prompt`` tokens, the last ``given`` of which no turn had before: those whose routing earlier turns
    have said. The last token of an answer is run only when another follows."""
    return max(0, prompt - given - 1)


def _tokens(part: Part) -> np.ndarray:
    if isinstance(part, np.ndarray):
        return part
    return part.said.tokens if isinstance(part, Again) else part.tokens


def _routing(parts: Sequence[Part]) -> np.ndarray:
    """`Trajectory.routing`. Where several turns say it of a token, the first counts: it was sampled with that."""
    said, end = [], 0
    for part in parts:
        end += len(_tokens(part))
        if isinstance(part, np.ndarray):
            continue
        routing = (part.said if isinstance(part, Again) else part).routing
        if routing.size:
            said.append((end, routing))
    if not said:
        return routes.no_routing()
    found = routes.unrouted(end, said[0][1])
    for end, routing in reversed(said):
        if (routing.shape[1:], routing.dtype) != (found.shape[1:], found.dtype) or len(routing) > end:
            raise ExperienceError(
                f"routing: {routing.dtype} {routing.shape}, where it ends at token {end} and begins with {found.dtype} "
                f"{found.shape}: was it recorded by another model?"
            )
        known = (routing != routes.unknown(routing.dtype)).all((1, 2))
        found[end - len(routing) : end][known] = routing[known]
    return found
