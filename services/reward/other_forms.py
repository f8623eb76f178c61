"""Reward functions as they are written for verl and TRL: other names of what there is, and lists of a group's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from penstock.protocols.experience import Prompt

ROW, CHAT, EXTRA = "row", "chat", "extra_info"
"""Offered to these alone: the truth, where that is a map, a whole row say; the messages of a prompt that has some, None
of a plain one; and the row's column of that name, an empty map where it has none."""
NAMES = {"solution_str": "response", "ground_truth": "truth", "data_source": "source", EXTRA: EXTRA}
"""verl's, and what they are here."""
TURNS = "turns"
"""By them one answer's `EXTRA` is told how many there were."""
LISTS = "completions"
"""By this argument TRL's functions are known."""
FOR_LISTS = "response", "truth", "prompt", ROW, CHAT
"""What these are made of."""
NO_COLUMNS = "prompt", "completion", "completion_ids"
"""Of a row, what TRL calls otherwise, or does not pass on."""


def more_of_prompt(prompt: Prompt) -> dict[str, Any]:
    """`ROW`, `CHAT` and `EXTRA`."""
    row = prompt.truth if isinstance(prompt.truth, dict) else {}
    return {ROW: row, CHAT: prompt.messages, EXTRA: row.get(EXTRA) or {}}


def extra_with(extra: Any, turns: Sequence[str]) -> Any:
    """`EXTRA` of one answer, as verl's reward managers hand it over: with ``num_turns``, that of the messages, the
    prompt's and those between the policy's ``turns`` counted too, and ``rollout_reward_scores``, which are none here.

    >>> extra_with({"index": 7}, ["4"])
    {'index': 7, 'num_turns': 2, 'rollout_reward_scores': {}}
    """
    told = {"num_turns": 2 * len(turns), "rollout_reward_scores": {}}
    return {**extra, **told} if isinstance(extra, Mapping) else extra


def columns_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The row's, that one of TRL's is given."""
    return {name: value for name, value in given[ROW].items() if name not in NO_COLUMNS}


def in_lists(given: Mapping[str, Any], of_group: Collection[str]) -> dict[str, list[Any]]:
    """All that one of TRL's may ask for about a group, each a list with one for each answer: ``prompts`` and
    ``completions``, texts, or messages where the prompt has some; each column of the row; and what was ``given``, of
    which ``of_group`` says what there is once.

    >>> plain = {"response": ["4", "5"], "prompt": "2+2=", "truth": {"answer": "4"}, "row": {"answer": "4"}}
    >>> found = in_lists(plain | {"chat": None}, ["prompt", "truth", "row", "chat"])
    >>> found["prompts"], found["completions"], found["answer"]
    (['2+2=', '2+2='], ['4', '5'], ['4', '4'])
    """
    size, chat = len(given["response"]), given[CHAT]
    once = {"ground_truth": given["truth"], **{name: given[name] for name in of_group if name in given}}
    once |= columns_of(given) | {"prompts": chat or given["prompt"]}
    said = [[{"role": "assistant", "content": text}] if chat else text for text in given["response"]]
    return {**given, **{name: [value] * size for name, value in once.items()}, LISTS: said}
