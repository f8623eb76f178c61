"""Groups of prompts that are answered once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from penstock.protocols.experience import Group, Trajectory
from penstock.protocols.messages import Lease
from penstock.services.rollout.config import GivenConfig
from penstock.services.rollout.engines.base import Completion, Engine, Refusal, Request, RequestError
from penstock.services.rollout.group_maker import Made, handle_of
from penstock.services.turns.given import given_trajectory, preferred
from penstock.services.turns.joining import join
from penstock.services.turns.streams import stream_of
from penstock.services.turns.tokenizer import Tokenizer

BASELINE = 1 << 40
"""Added to a group's handle for its greedy answer: a request of its own."""


@dataclass(slots=True)
class _Work:
    """A group that is being generated."""

    lease: Lease
    tokens: np.ndarray
    given: list[Trajectory]
    """The last of those that are no greedy one: the first are sampled as they would be without them."""
    completions: dict[int, Completion] = field(default_factory=dict)
    """By place in the group; a greedy one is the last."""


class SingleTurn:
    """See `group_maker.GroupMaker`."""

    def __init__(
        self, engine: Engine, text: Tokenizer, given: GivenConfig | None = None, max_length: int | None = None
    ) -> None:
        """``given``: which answers of training groups are their rows' own. ``max_length``: tokens that an answer may
        have with its prompt, None where the engine alone knows."""
        self._engine, self._text = engine, text
        self._given, self._max_length = given or GivenConfig(), max_length
        self._work: dict[int, _Work] = {}
        """By what the engine calls them."""

    def start(self, lease: Lease) -> Made | None:
        """See `GroupMaker.start`."""
        given, sampling = self._given_to(lease), lease.sampling
        sampled = sampling.n - len(given)
        if not sampled:
            return lease, Group(lease.number, lease.prompt, given)
        tokens = self._text.encode(lease.prompt)
        if not sampling.max_new_tokens:
            sampling = sampling.model_copy(update={"max_new_tokens": self._room(lease, len(tokens))})
        work, handle = _Work(lease, tokens, given), handle_of(lease)
        own = sampling.model_copy(update={"greedy_baseline": False, "n": sampled})
        shown, unread = lease.prompt.pictures, lease.purpose == "eval"
        self._engine.submit(Request(handle, lease.seed, tokens, own, stream_of(lease), pictures=shown, unread=unread))
        self._work[handle] = work
        if sampling.greedy_baseline:
            greedy = sampling.one(greedy=True)
            self._engine.submit(Request(handle + BASELINE, lease.seed, tokens, greedy, pictures=shown))
            self._work[handle + BASELINE] = work
        return None

    def _room(self, lease: Lease, size: int) -> int:
        """Raises `RequestError` where no token has any behind a prompt of ``size``."""
        room = lease.sampling.room(size, self._max_length)
        if room < 1:
            raise RequestError(
                f"a prompt of {size} tokens leaves no room for an answer in the {self._max_length} that rollout.engine "
                "and the model take (rollout.engine.max_length)"
            )
        return room

    def _given_to(self, lease: Lease) -> list[Trajectory]:
        """Of each kind all the same: one is as much of the group as another answer."""
        config, found = self._given, list[Trajectory]()
        if lease.purpose == "eval":
            return found
        for rejected, count in ((False, config.answers), (True, config.rejected)):
            if count:
                about = config.turns, lease.version, self._max_length, lease.sampling.candidates
                one = given_trajectory(self._text, lease.prompt, *about, rejected)
                found += [one if not config.rejected else preferred(one, not rejected)] * count
        if config.rejected and np.array_equal(found[0].tokens, found[-1].tokens):
            raise RequestError("the row's answer and the one that it is preferred to (rejected_key) are the same")
        return found

    def has(self, lease: Lease) -> bool:
        """See `GroupMaker.has`."""
        return handle_of(lease) in self._work

    def take(self, result: Completion | Refusal) -> Made | None:
        """See `GroupMaker.take`."""
        work = self._work.get(result.number)
        if work is None:
            return None
        lease, handle = work.lease, handle_of(work.lease)
        if isinstance(result, Refusal):
            self._forget(handle)
            self._engine.abort(handle)
            self._engine.abort(handle + BASELINE)
            return lease, result.reason
        place = result.sample if result.number == handle else lease.sampling.n
        work.completions[place] = result
        if len(work.completions) + len(work.given) < lease.sampling.trajectories:
            return None
        self._forget(handle)
        places = sorted(work.completions)
        completions = [work.completions[place] for place in places]
        try:
            texts = self._text.decode([c.tokens.tolist() for c in completions])
            shown = lease.prompt.pictures
            trajectories = [
                join([work.tokens, c], text, c.finish, greedy=place == lease.sampling.n, pictures=shown)
                for place, c, text in zip(places, completions, texts, strict=True)
            ]
        except Exception as error:  # an engine's numbers that break a trajectory's rules, say
            return lease, f"{type(error).__name__}: {error}"
        end = lease.sampling.n - len(work.given)
        return lease, Group(lease.number, lease.prompt, [*trajectories[:end], *work.given, *trajectories[end:]])

    def heard(self, event: object) -> Made | None:
        """See `GroupMaker.heard`."""
        raise TypeError(f"unexpected event {type(event).__name__}")

    def gauges(self) -> dict[str, float]:
        """See `GroupMaker.gauges`."""
        return {}

    def close(self) -> None:
        """See `GroupMaker.close`."""

    def _forget(self, handle: int) -> None:
        for each in (handle, handle + BASELINE):
            self._work.pop(each, None)
