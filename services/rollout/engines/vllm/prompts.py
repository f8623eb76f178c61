"""Prompts as vLLM takes them, which makes of a picture's mark the tokens of the picture by itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from penstock.services.data.picture_files import open_picture
from penstock.services.modeling.pictures import PictureReader
from penstock.services.rollout.engines.base import EngineError, Request, RequestError
from penstock.services.runtime.kept import Kept

BLIND = (
    "it shows pictures, and vLLM was started for words alone; set images_key, or pictures: true of the custom source, "
    "the environment (rollout.environment.pictures) or the gateway (gateway.pictures) that shows them"
)

OPENED: Kept[Any] = Kept(1 << 30, lambda image: 4 * image.width * image.height)
"""Pictures, up to so many bytes of their pixels, as Pillow has them: a group's answers follow each other, and a
session's turns. All of a conversation fit, or its first would be gone whenever it comes again."""


def shown_prompt(request: Request, reader: PictureReader | None) -> dict[str, Any]:
    """``request`` without sampling, for ``AsyncLLM.generate``. Raises `RequestError` where its tokens are not those of
    its pictures."""
    tokens = request.tokens.tolist()
    if not request.pictures:
        return {"prompt_token_ids": tokens}
    assert reader, "submit() has refused it"
    if request.sampled is not None and reader.mark_id in request.tokens[request.sampled]:
        raise RequestError("the policy has sampled a picture's own token, which vLLM would take for a picture")
    folded: list[int] = []
    for picture in request.pictures:
        expansion = reader.expansion(picture)
        place = _place_of(expansion, tokens)
        folded += [*tokens[:place], reader.mark_id]
        tokens = tokens[place + len(expansion) :]
    return {
        "prompt_token_ids": folded + tokens,
        "multi_modal_data": {"image": [OPENED.get(each, partial(open_picture, each)) for each in request.pictures]},
    }


def check_shown(request: Request, run: list[int] | None) -> None:
    """Raises `EngineError` where vLLM has ``run`` other tokens than those of ``request``, so that a trainer would learn
    of another prompt."""
    if request.pictures and run is not None and not np.array_equal(run, request.tokens):
        raise EngineError(
            f"vLLM makes {len(run)} tokens of a prompt with pictures of which transformers' processor makes "
            f"{len(request.tokens)}: they are of different versions, or rollout.engine.vllm.mm_processor_kwargs are "
            "set; use rollout.engine.type=torch, or leave these out"
        )


def _place_of(part: list[int], tokens: list[int]) -> int:
    """Where the first ``part`` begins in ``tokens``. Raises `RequestError`."""
    first, size = part[0], len(part)
    place = -1
    while first in tokens[place + 1 :]:
        place = tokens.index(first, place + 1)
        if tokens[place : place + size] == part:
            return place
    raise RequestError(f"the prompt has no place for a picture of {size} tokens")
