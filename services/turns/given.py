"""A row's own answer as a trajectory: nothing of it is sampled, and its tokens are learned as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from penstock.protocols.chat import said as in_words
from penstock.protocols.experience import Prompt, Trajectory, no_candidates
from penstock.protocols.routing import no_routing
from penstock.services.data.answers import is_answer, not_answer, own_answer
from penstock.services.turns.calls_told import Message
from penstock.services.turns.joining import Part, join
from penstock.services.turns.room import too_long
from penstock.services.turns.tokenizer import TextError, Tokenizer

Turns = Literal["all", "last"]
"""Which of the assistant's messages are learned."""


@dataclass(frozen=True)
class Said:
    """Tokens that nobody sampled, with what `joining.Sampled` has of each: no log-probability, and their rollout's
    version."""

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    candidate_counts: np.ndarray
    candidate_ids: np.ndarray = field(default_factory=no_candidates)
    routing: np.ndarray = field(default_factory=no_routing)


def given_trajectory(
    text: Tokenizer, prompt: Prompt, turns: Turns, version: int, max_length: int | None, counted: bool = False,
    rejected: bool = False,
) -> Trajectory:  # fmt: skip
    """The row's own answer behind its prompt, as a rollout that serves ``version`` would have sampled it. ``turns``
    ``all``: what the assistant has said in the prompt is learned too, each time behind what had been said before
    it, thoughts included, which templates leave out of what they tell of earlier turns. ``counted``: others of the
    group say how many candidates each token had. ``rejected``: the answer that it is preferred to, in its place.
    Raises `TextError` where the row has no answer, or one that has no room in ``max_length`` tokens (None: there is
    no bound)."""
    if rejected:
        try:
            return given_trajectory(text, _as_if_right(prompt), turns, version, max_length, counted)
        except TextError as error:
            raise TextError(f"the answer that the row's own is preferred to (rejected_key): {error}") from error
    asked, talk = _parts(prompt, turns)
    if reason := too_long(len(asked.as_text()) + sum(len(in_words(message)) for message in talk), max_length):
        raise TextError(reason)
    text = text.telling(prompt.chat_template_kwargs)
    asked_tokens = text.encode(asked)
    parts: list[Part] = [asked_tokens]
    said: list[np.ndarray] = []
    size = len(asked_tokens)

    def add(part: Part, tokens: int) -> None:
        nonlocal size
        parts.append(part)
        size += tokens
        if max_length is not None and size > max_length:  # each turn is made behind all before it: no more of them
            raise TextError(
                f"prompt and answer of the row have {size} tokens or more, and there is room for {max_length}"
            )

    def say(tokens: np.ndarray) -> None:
        said.append(tokens)
        counts = np.zeros(len(tokens) if counted else 0, np.int32)
        add(Said(tokens, np.zeros(len(tokens)), np.full(len(tokens), version), counts), len(tokens))

    if asked.messages is None:
        say(text.answer_to_text(asked.as_text(), talk[0]["content"]))
    else:
        heard: list[Message] = []
        last: Message = {}
        for place, message in enumerate(talk):
            if message["role"] != "assistant":
                heard.append(message)
                continue
            if said:
                between = text.observe(heard, True, int(said[-1][-1]), last, (), prompt.tools)
                add(between, len(between))
                heard = []
            say(text.answer_to_chat([*asked.messages, *talk[:place]], message, prompt.tools))
            last = message
    words = text.decode([tokens.tolist() for tokens in said])
    spoken = tuple(words) if words[1:] else ()
    return join(parts, "\n\n".join(words), "stop", turns=spoken, given=True, pictures=asked.pictures)


def preferred(made: Trajectory, is_preferred: bool) -> Trajectory:
    """``made``, a given one, with what it is worth beside the other of its pair."""
    rewards = np.zeros(len(made.tokens), np.float32)
    rewards[np.flatnonzero(made.loss_mask)[-1]] = is_preferred
    return replace(made, rewards=rewards)


def _as_if_right(prompt: Prompt) -> Prompt:
    if not is_answer(prompt.rejected):
        raise TextError(f"it is {not_answer(prompt.rejected)}, not text or messages")
    return prompt.model_copy(update={"answer": prompt.rejected})


def _parts(prompt: Prompt, turns: Turns) -> tuple[Prompt, Sequence[dict[str, Any]]]:
    """What is asked, and what is said from there on, which ends with the assistant's last message."""
    answer = own_answer(prompt)
    if not is_answer(answer):
        raise TextError(
            f"the row has no answer to give: its answer is {not_answer(answer)}, not text or messages; name the column "
            "that has it (prompts.train.answer_key)"
        )
    said = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    if said[-1]["role"] != "assistant":
        raise TextError(f"the row's answer ends with what the {said[-1]['role']} says, not the assistant")
    if prompt.messages is None:
        if isinstance(answer, list):
            raise TextError("the row's prompt is text and its answer messages; both must be one or the other")
        return prompt, said
    talk = [*prompt.messages, *said]
    spoken = [place for place, message in enumerate(talk) if message["role"] == "assistant"]
    first = spoken[0] if turns == "all" else spoken[-1]
    if not first:
        raise TextError("the row's conversation begins with the assistant, who was asked nothing")
    asked = prompt.model_copy(update={"messages": talk[:first]})
    if prompt.pictures and asked.marks != prompt.marks:
        raise TextError(
            "the row shows a picture behind the assistant's first words, and what is learned may show none; set "
            "rollout.given.turns=last"
        )
    return asked, talk[first:]
