"""A session: the turns that one agent has had from the policy, as a tree, and the trajectories that become of it.

A request goes on from the turn whose conversation it begins with, and is spliced onto the tokens that were sampled
there. Where an agent rewrites its history it goes on from an earlier turn, or from none: the session branches. Every
branch becomes a trajectory; a turn that several branches share is trained on in the first of them alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.protocols.experience import Trajectory
from penstock.services.turns.answers import Answer
from penstock.services.turns.joining import Again, Part, join

Said = list[dict[str, Any]]
"""Messages in the form in which they are compared: see `canonical`."""


def canonical(message: Mapping[str, Any]) -> dict[str, Any]:
    """What a chat template reads of a message, however the client has written it: texts joined, arguments parsed,
    nothing empty."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    found: dict[str, Any] = {"role": message["role"], "content": content or ""}
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError:
                pass  # as the policy wrote it
        about: dict[str, Any] = {"name": function.get("name"), "arguments": {} if arguments is None else arguments}
        calls.append({"id": call.get("id"), "type": "function", "function": about})
    if calls:
        found["tool_calls"] = calls
    for name in ("tool_call_id", "name"):
        if message.get(name):
            found[name] = message[name]
    return found


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
    tools: str = ""
    """The tools that the policy was told of, as JSON."""
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
    failure: str = ""
    """Why it has no reward."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What its agent has measured."""

    def begin_anew(self, taken: bool) -> None:
        """Another agent takes it, from the start; ``taken``: the one before had heard of it."""
        self.life, self.opened, self.turns = self.life + 1, False, {}
        self.spared += not taken

    def parent_of(self, said: Said, tools: str) -> Turn | None:
        """The turn with the longest conversation that ``said`` begins with, told of the same ``tools``."""
        best: Turn | None = None
        for turn in self._known():
            size = len(turn.said)
            if turn.tools != tools or size >= len(said) or (best and len(best.said) >= size):
                continue
            if said[:size] == turn.said:
                best = turn
        return best

    def parent_by_tokens(self, tokens: np.ndarray) -> tuple[Turn | None, np.ndarray]:
        """As `parent_of`, of an agent that speaks in tokens; and what it has added."""
        best, size = None, 0
        for turn in self._known():
            before = self.tokens(turn)
            if size < len(before) < len(tokens) and np.array_equal(tokens[: len(before)], before):
                best, size = turn, len(before)
        return best, tokens[size:]

    def parent_by_text(self, text: str) -> Turn | None:
        """As `parent_of`, of an agent that speaks in text, with no chat around it."""
        fitting = [turn for turn in self._known() if turn.text and text.startswith(turn.text)]
        return max(fitting, key=lambda turn: len(turn.text), default=None)

    def _known(self) -> list[Turn]:
        """Those first that agents have had: of two answers that read the same, they speak of these."""
        return sorted(self.turns.values(), key=lambda turn: not turn.wanted)

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

    def tokens_before(self, turn: Turn) -> np.ndarray:
        """int32: all that comes before this answer."""
        before = None if turn.parent is None else self.turns[turn.parent]
        return np.concatenate([self.tokens(before), turn.given])

    def trajectories(
        self, decode: Callable[[Sequence[int]], str], prompt: np.ndarray, greedy: bool
    ) -> list[Trajectory]:
        """One for each branch, in the order of their last turns; one without a turn where there is none. ``prompt``:
        what stands for a session in which nothing was said."""
        trained: set[int] = set()
        found = []
        for leaf in self._leaves():
            path = self.path(leaf)
            parts: list[Part] = []
            for turn in path:
                parts += [turn.given, Again(turn.answer) if turn.number in trained else turn.answer]
            trained |= {turn.number for turn in path}
            tokens = self.tokens(leaf)
            rewards = np.zeros(len(tokens), np.float32)
            rewards[-1] = self.reward
            words = tuple(decode(turn.answer.tokens.tolist()) for turn in path)
            text = decode(tokens[len(path[0].given) :].tolist())
            made = join(parts, text, leaf.answer.finish, rewards, words, self.failure, greedy)
            found.append(replace(made, session=self.place, metrics=self.metrics))
        if not found:
            failure = self.failure or "its agent has had no turn"
            made = join([prompt], "", "length", np.zeros(len(prompt), np.float32), (), failure, greedy)
            found.append(replace(made, session=self.place, metrics=self.metrics))
        return found

    def _leaves(self) -> list[Turn]:
        wanted = [turn for turn in self.turns.values() if turn.wanted]
        inner = {before.number for turn in wanted for before in self.path(turn)[:-1]}
        return [turn for turn in wanted if turn.number not in inner]
