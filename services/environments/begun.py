"""What a session of an environment begins with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.protocols.experience import PICTURE, Prompt


def begun_with(task: Prompt, found: Mapping[str, Any]) -> Prompt:
    """``task``, or what its reset has ``found`` in that one's place (`sessions.Sessions`), which may show pictures of
    its own, or by as many marks those of the task. Raises `ValueError` where it has other marks than these."""
    said = found["prompt"]
    if said is None:
        return task
    if isinstance(said, str) and task.messages is not None:  # told as the task would have been
        before = [message for message in task.messages if message["role"] == "system"]
        said = [*before, {"role": "user", "content": said}]
    form = {"text": said} if isinstance(said, str) else {"messages": said}
    told = {"tools": task.tools, "chat_template_kwargs": task.chat_template_kwargs}
    prompt = Prompt(index=task.index, truth=task.truth, **told, **form)
    shown = tuple(found["pictures"]) or task.pictures
    if not shown or not prompt.marks:
        return prompt
    if prompt.marks != len(shown):
        raise ValueError(
            f"reset says {PICTURE} {prompt.marks} times, and its task shows {len(shown)} pictures: say it once for "
            "each, in their order, or give a Turn with pictures of its own"
        )
    return prompt.model_copy(update={"pictures": shown})
