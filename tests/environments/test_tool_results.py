"""What tools give: words and pictures."""

from __future__ import annotations

import base64
import io
import itertools
import json
import queue
import string
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocols.experience import PICTURE, Prompt
from penstock.services.environments.config import EnvironmentConfig
from penstock.services.environments.pool import EnvironmentPool
from penstock.services.environments.tool_results import LEFT_OUT, Cut, as_messages, of_returned, of_server
from tests import shown

Image = pytest.importorskip("PIL.Image")
RED, GREEN = (shown.picture(shown.COLOURS[name]) for name in "rg")


def zoomed(times: int, task: Prompt) -> Any:
    """Looks closer."""
    left = Image.open(io.BytesIO(task.pictures[0])).resize((16, 16))
    return [f"{times} times <image>:", left, {"was": 8}]


def plain(task: Prompt) -> list[str]:
    """Says what it saw."""
    return ["nothing", "<image>"]


def called(pictures: bool, *calls: dict[str, Any]) -> Any:
    """What the pool answers to a turn with these calls."""
    functions = [f"{__name__}:zoomed", f"{__name__}:plain"]
    told = {"environment": "tools", "options": {"functions": functions}, "pictures": pictures}
    pool, said = EnvironmentPool(EnvironmentConfig.model_validate(told)), queue.Queue[Any]()
    asked = "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
    try:
        task = Prompt(index=0, text=f"{PICTURE}p", pictures=(RED,))
        pool.reset(0, task, lambda found, error: said.put(error or found))
        assert {tool["function"]["name"] for tool in said.get(timeout=30)["tools"]} == {"zoomed", "plain"}
        pool.step(0, asked, lambda found, error: said.put(error or found))
        return said.get(timeout=30)
    finally:
        pool.close()


ZOOM, PLAIN = {"name": "zoomed", "arguments": {"times": 2}}, {"name": "plain", "arguments": {}}


def test_the_policy_sees_what_a_function_shows_where_that_stands() -> None:
    found = called(True, PLAIN, ZOOM, ZOOM)
    told = [message["content"] for message in found["observation"]]
    assert told == ['["nothing", "<image/>"]', *['2 times <image/>:<image>{"was": 8}'] * 2]
    assert [Image.open(io.BytesIO(file)).size for file in found["pictures"]] == [(16, 16)] * 2


def test_pictures_that_engines_were_not_told_of_are_an_error_and_words_are_none() -> None:
    assert called(False, ZOOM) == (
        "shows pictures, and rollout.environment.pictures is false: set it to true, so that engines know before "
        "the first comes"
    )
    (told,) = called(False, PLAIN)["observation"]
    assert told["content"] == '["nothing", "<image>"]', "as it was said"


def of_a_server(*blocks: dict[str, str], is_error: bool = False) -> Any:
    return SimpleNamespace(content=[SimpleNamespace(**block) for block in blocks], is_error=is_error)


def test_a_servers_pictures_are_shown_where_the_environment_shows_any() -> None:
    image = {"type": "image", "data": base64.b64encode(GREEN).decode(), "mime_type": "image/png"}
    said = of_a_server({"type": "text", "text": "here:"}, image, {"type": "audio", "mime_type": "audio/wav"})
    assert of_server("look", said, shows=True) == ("here:", "\n", GREEN, "\n", "[audio audio/wav]")
    assert "".join(map(str, of_server("look", said, shows=False))) == "here:\n[image image/png]\n[audio audio/wav]"
    assert of_server("look", of_a_server({"type": "text", "text": "no"}, is_error=True), True) == (
        "error: look: ",
        "no",
    )
    with pytest.raises(ValueError, match="no picture"):
        of_server("look", of_a_server({**image, "data": base64.b64encode(b"0123456789").decode()}), shows=True)


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5), longest=st.integers(1, 30),
    cut=st.sampled_from(["end", "middle", "start"]), seen=st.integers(0, 5),
)  # fmt: skip
def test_of_a_long_result_both_ends_or_one_are_read(sizes: list[int], longest: int, cut: Cut, seen: int) -> None:
    letters = iter(string.ascii_letters)
    words = ["".join(itertools.islice(letters, size)) for size in sizes]
    parts: list[str | bytes] = [*words]
    parts.insert(min(seen, len(parts)), RED)
    ((told,), pictures) = as_messages([tuple(parts)], longest, cut)
    content, whole = told["content"], "".join(words)
    assert pictures == [RED] and content.count(PICTURE) == 1
    found = content.replace(PICTURE, "")
    if len(whole) <= longest or cut == "end":
        assert found == whole[:longest]
        return
    first = longest // 2 if cut == "middle" else 0
    said = LEFT_OUT.format(len(whole) - longest)
    assert found == whole[:first] + said + whole[len(whole) - longest + first :]


def test_what_is_too_long_is_cut_and_keeps_its_pictures() -> None:
    told, pictures = as_messages([("12345", RED, "6789", GREEN), ("abcdefghij",), of_returned({"a": [1]})], 7)
    assert [message["content"] for message in told] == ["12345<image>67<image>", "abcdefg", '{"a": [']
    assert pictures == [RED, GREEN] and all(message["role"] == "tool" for message in told)
