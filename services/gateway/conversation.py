"""A conversation that the policy is to go on with, and what its chat template is told beside the messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penstock.protocols.experience import Prompt
from penstock.services.turns.tokenizer import Tokenizer


class Telling(NamedTuple):
    """What the policy is told beside messages, as JSON, to be compared: a conversation that goes on has the same."""

    tools: str = ""
    template: str = ""
    """What the chat template is told, over what the run says."""

    @property
    def named(self) -> list[str]:
        """By which requests are told apart, also by a gateway of older code, which knew of tools alone."""
        return [self.tools, *[self.template] * bool(self.template)]


NOTHING = Telling()


class Conversation(NamedTuple):
    """What an agent asks the policy to go on with."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    template: Mapping[str, Any] | None = None

    def about(self, task: Prompt, text: Tokenizer) -> Conversation:
        """With what the ``task`` of its session has the chat template told, where the agent does not say it, and
        without what the run has it told, by its ``text``."""
        return self._replace(template=text.added({**(task.chat_template_kwargs or {}), **(self.template or {})}))

    @property
    def telling(self) -> Telling:
        """What is told beside the messages."""
        told = (list(self.tools) if self.tools else None), self.template or None
        return Telling(*(json.dumps(each, sort_keys=True) if each else "" for each in told))
