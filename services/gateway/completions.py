"""OpenAI's completions: text or tokens in, the policy's next words out, with no chat template between."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from penstock.services.gateway.asking import Listed, Never, Several
from penstock.services.gateway.chat import about, streamed, usage
from penstock.services.gateway.replies import Replies
from penstock.services.gateway.session import Turn


def _one(prompt: Any) -> Any:
    """Of a list of one prompt, that one."""
    return prompt if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt[0]


Ids = Annotated[Listed[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
Alone = Annotated[Listed[str] | Listed[Ids], Field(min_length=1, max_length=1)]


class CompletionRequest(Several):
    """``POST /v1/completions``. How tokens are drawn is the run's."""

    prompt: Annotated[str | Ids | Alone, AfterValidator(_one)]
    """A text or token ids; a list of one of them is that one."""
    max_tokens: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0)
    echo: Never = None
    suffix: Never = None
    best_of: int | None = None

    @field_validator("best_of")
    @classmethod
    def _all_of_them(cls, best_of: int | None, said: ValidationInfo) -> int | None:
        if (best_of or 1) > (said.data.get("n") or 1):
            raise ValueError("no answer is left out: at most n")
        return best_of


def completion(
    session: str, model: str, turns: Sequence[Turn], replies: Replies, asked: CompletionRequest
) -> dict[str, Any]:
    """The answer, whole."""
    choices = [_choice(index, turn, replies, asked) for index, turn in enumerate(turns)]
    return {
        **_head(session, model, turns), "choices": choices, "usage": usage(turns), "penstock": about(session, turns),
    }  # fmt: skip


def chunks(
    session: str, model: str, turns: Sequence[Turn], replies: Replies, asked: CompletionRequest
) -> Iterator[str]:
    """The answer as server-sent events."""
    choices = (_choice(index, turn, replies, asked) for index, turn in enumerate(turns))
    return streamed(_head(session, model, turns), choices, session, turns, asked)


def _head(session: str, model: str, turns: Sequence[Turn]) -> dict[str, Any]:
    about_it = {"id": f"cmpl-{session}-{turns[0].number}", "object": "text_completion"}
    return {**about_it, "created": int(time.time()), "model": model}


def _choice(index: int, turn: Turn, replies: Replies, asked: CompletionRequest) -> dict[str, Any]:
    said: dict[str, Any] | None = None
    if asked.logprobs is not None:
        tokens = replies.logprobs(turn.answer)
        said = {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": None,
            "text_offset": [],
        }
    text = turn.message["content"]
    return {"index": index, "text": text, "finish_reason": turn.answer.finish, "logprobs": said}
