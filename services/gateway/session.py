"""A session: the turns that one agent has had from the policy, as a tree, and the trajectories that become of it.

A request goes on from the turn whose conversation it begins with, and is spliced onto the tokens that were sampled
there. Where an agent rewrites its history it goes on from an earlier turn, or from none: the session branches. Every
branch becomes a trajectory; a turn that several branches share is trained on in the first of them alone.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from penstock.protocols.experience import ALONE, Branches, Finish, Trajectory
from penstock.services.data.picture_files import MOST_OF_GROUP
from penstock.services.gateway.conversation import NOTHING, Telling
from penstock.services.gateway.pictures import digests
from penstock.services.turns.answers import Answer
from penstock.services.turns.joining import Again, Part, join, placed

Said = list[dict[str, Any]]
"""Messages in the form in which they are compared: see `canonical`."""


def is_chat(said: Said) -> bool:
    """Its last words are a message's, and no text or tokens that are gone on from."""
    return bool(said) and "role" in said[-1]


def canonical(message: Mapping[str, Any]) -> dict[str, Any]:
    """What a chat template reads of a message, however the client has written it: texts joined, pictures by their
    digests, arguments parsed, nothing empty."""
    content = message.get("content")
    if isinstance(content, list) and not any(True for _ in digests([message])):
        content = "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    found: dict[str, Any] = {"role": message["role"], "content": content or ""}
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                pass  # as the policy wrote it
        about: dict[str, Any] = {"name": function.get("name"), "arguments": {} if arguments is None else arguments}
        calls.append({"id": call.get("id"), "type": "function", "function": about})
    if calls:
        found["tool_calls"] = calls
    for name in ("tool_call_id", "name"):
        if message.get(name):
            found[name] = message[name]
    if found["role"] == "assistant":
        found.pop("name", None)  # what a framework calls its agent, which the policy did not say
    return found


def _digest(words: str) -> bytes:
    return hashlib.sha256(words.encode(errors="replace")).digest()


@dataclass(eq=False)
class Turn:
    """One answer of the policy."""

    number: int
    parent: int | None
    """The turn that it goes on from; None: it begins a conversation."""
    given: np.ndarray
    """int32: the tokens between the parent's answer, or the beginning, and this one."""
    answer: Answer
    said: Said
    """The conversation up to it, and its own message last. Its parent's come first, as the same objects. Where there
    was no chat, ``{"text": …}`` or ``{"tokens": …}`` is what was added."""
    telling: Telling = NOTHING
    """What the policy was told beside it."""
    asked: str = ""
    """A digest of what was asked."""
    prompt_tokens: int = 0
    """All that comes before it."""
    message: dict[str, Any] = field(default_factory=dict)
    """What its agent is told: an assistant's message."""
    stopped_by: str = ""
    """The text that its agent had it end with, which the message leaves out; empty: it ended otherwise."""
    wanted: bool = True
    """Its agent has had it. One that nobody was left to hear is not trained on, unless a turn goes on from it."""
    reward: float | None = None
    """What its agent has said that it was worth, if it has."""
    pictures: tuple[bytes, ...] = ()
    """What `given` shows."""

    @property
    def size(self) -> int:
        """Tokens of the conversation, up to the end of this answer."""
        return self.prompt_tokens + len(self.answer.tokens)

    @cached_property
    def characters(self) -> int:
        """Of `text`."""
        return len(self.text)

    @property
    def text(self) -> str:
        """The text that was gone on from, and what was answered; empty where there was a chat, or tokens."""
        if "text" not in self.said[0] or any("tokens" in each for each in self.said):
            return ""
        return "".join(each["text"] if "text" in each else each["content"] for each in self.said)


@dataclass(eq=False)
class Session:
    """One trajectory of a group, or more where it branches."""

    place: int
    life: int = 0
    """How often it was begun anew."""
    spared: int = 0
    """How often of these no agent had heard of it."""
    opened: bool = False
    """An agent has it."""
    owner: str = ""
    """The name of the key by which it was opened."""
    beats: bool = False
    """By a client that says that it is alive."""
    turns: dict[int, Turn] = field(default_factory=dict)
    next_turn: int = 0
    """Numbers are not used again, in another life neither."""
    unheard: set[int] = field(default_factory=set)
    """Turns that no agent was left to hear, of a session that has ended."""
    ended: bool = False
    reward: float = 0.0
    """Beside its turns' own."""
    failure: str = ""
    """Why it has no reward."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What its agent has measured."""
    truncated: bool = False
    """Its newest branch was cut off, its agent says; all, where they are answers of their own."""
    branches: Branches = "shared"
    files: dict[str, bytes] = field(default_factory=dict)
    """By digest, what its turns show, those too that have no answer yet."""
    room: int = MOST_OF_GROUP
    """Bytes of `files`, at most."""
    instructions: set[bytes] | None = field(default_factory=set)
    """Digests of what turns were told as that (`responses`), of which one takes another's place; None: of another
    gateway, and not known."""

    def instruct(self, words: str) -> None:
        """Notes it, of a turn that there is."""
        if self.instructions is not None:
            self.instructions.add(_digest(words))

    def was_instructed(self, words: Any) -> bool:
        """A system's message of these words was that, or may have been."""
        return self.instructions is None or (isinstance(words, str) and _digest(words) in self.instructions)

    def begin_anew(self, taken: bool) -> None:
        """Another agent takes it, from the start; ``taken``: the one before had heard of it."""
        self.life, self.opened, self.turns, self.files, self.instructions = self.life + 1, False, {}, {}, set()
        self.spared += not taken

    def end(self, how: Mapping[str, Any]) -> None:
        """So good it is (``reward``, ``turn_rewards`` by number), or it has no reward for the reason of its
        ``failure``; see `records`."""
        self.ended, self.reward, self.failure = True, how["reward"], how["failure"]
        self.metrics, self.truncated = how.get("metrics", {}), how.get("truncated", False)  # of older code
        self.branches = how.get("branches", "shared")
        for turn in self.turns.values():
            turn.reward = how.get("turn_rewards", {}).get(str(turn.number))

    def parent_of(self, said: Said, telling: Telling) -> Turn | None:
        """The turn with the longest conversation that ``said`` begins with, told the same beside it."""
        for turn in self._longest_first(lambda turn: len(turn.said)):
            size = len(turn.said)
            if turn.telling != telling or size >= len(said) or said[size - 1] != turn.said[-1]:  # where most differ
                continue
            if said[:size] == turn.said:
                return turn
        return None

    def parent_by_tokens(self, tokens: np.ndarray) -> tuple[Turn | None, np.ndarray]:
        """As `parent_of`, of an agent that speaks in tokens; and what it has added."""
        for turn in self._longest_first(lambda turn: turn.size):
            own = slice(turn.prompt_tokens, turn.size)
            if turn.size >= len(tokens) or not np.array_equal(tokens[own], turn.answer.tokens):
                continue
            if np.array_equal(tokens[: turn.size], self.tokens(turn)):
                return turn, tokens[turn.size :]
        return None, tokens

    def parent_by_text(self, text: str) -> Turn | None:
        """As `parent_of`, of an agent that speaks in text, with no chat around it."""
        for turn in self._longest_first(lambda turn: turn.characters):
            if 0 < turn.characters <= len(text) and text.startswith(turn.text):
                return turn
        return None

    def _longest_first(self, size: Callable[[Turn], int]) -> list[Turn]:
        """Of two that are as long, the one first that its agent has had: where they read the same, it speaks of that
        one."""
        return sorted(self.turns.values(), key=lambda turn: (-size(turn), not turn.wanted, turn.number))

    def path(self, turn: Turn | None) -> list[Turn]:
        """From the first turn of its conversation to this one."""
        found: list[Turn] = []
        while turn is not None:
            found.append(turn)
            turn = None if turn.parent is None else self.turns[turn.parent]
        return found[::-1]

    def tokens(self, turn: Turn | None) -> np.ndarray:
        """int32: all of a conversation, up to the end of this answer."""
        parts = [part for each in self.path(turn) for part in (each.given, each.answer.tokens)]
        return np.concatenate([np.zeros(0, np.int32), *parts])

    def pictures(self, turn: Turn | None) -> tuple[bytes, ...]:
        """All that a conversation shows, up to this answer."""
        return tuple(picture for each in self.path(turn) for picture in each.pictures)

    def trajectories(
        self, decode: Callable[[Sequence[int]], str], prompt: np.ndarray, greedy: bool,
        pictures: tuple[bytes, ...] = (),
    ) -> list[Trajectory]:  # fmt: skip
        """One for each branch, in the order of their last turns; one without a turn where there is none. ``prompt``,
        which shows ``pictures``: what stands for a session in which nothing was said. Each branch is worth what the
        session is, or its own turns (`Branches`): each turn's reward lies on the turn, where it is trained on, and all
        that is left on the branch's last token. One that is worth its own has a metric ``branch``: which of the
        session's conversations it is of, in the order in which these began, from 0."""
        trained: set[int] = set()
        alone = self.branches == "own"
        found = []
        leaves = self._leaves()
        begun = sorted({self.path(leaf)[0].number for leaf in leaves})
        for leaf in leaves:
            path = self.path(leaf)
            parts: list[Part] = []
            for turn in path:
                parts += [turn.given, Again(turn.answer) if turn.number in trained else turn.answer]
            mine = {turn.number for turn in path} - trained
            trained |= mine
            tokens, own = self.tokens(leaf), [turn.reward or 0.0 for turn in path if turn.number in mine]
            worth = path if alone else self.turns.values()
            elsewhere = math.fsum(turn.reward or 0.0 for turn in worth) - math.fsum(own)
            rewards = placed(parts, [*own[:-1], math.fsum([own[-1], self.reward, elsewhere])])
            words = tuple(decode(turn.answer.tokens.tolist()) for turn in path)
            text = decode(tokens[len(path[0].given) :].tolist())
            shown = self.pictures(leaf)
            finish: Finish = "length" if self.truncated and (alone or leaf is leaves[-1]) else leaf.answer.finish
            made = join(parts, text, finish, rewards, words, self.failure, greedy, pictures=shown)
            metrics = {"branch": float(begun.index(path[0].number))} if alone else {}
            found.append(replace(made, session=ALONE if alone else self.place, metrics=metrics | self.metrics))
        if not found:
            failure = self.failure or "its agent has had no turn"
            nothing = np.zeros(len(prompt), np.float32)
            made = join([prompt], "", "length", nothing, (), failure, greedy, pictures=pictures)
            found.append(replace(made, session=self.place, metrics=self.metrics))
        return found

    def _leaves(self) -> list[Turn]:
        """By their numbers: answers arrive in any order, which nobody knows any more after a takeover."""
        wanted = [turn for _, turn in sorted(self.turns.items()) if turn.wanted]
        inner = set[int]()
        for turn in wanted:
            before = turn.parent
            while before is not None and before not in inner:
                inner.add(before)
                before = self.turns[before].parent
        return [turn for turn in wanted if turn.number not in inner]
