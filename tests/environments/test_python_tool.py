"""The tool python: what the policy reads of its programs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from penstock.services.environments.tools import Tools


def run(code: str, longest: int = 8000, cut: str = "end", **limits: Any) -> str:
    options: dict[str, Any] = {"longest": longest, "cut": cut, **({"python": limits} if limits else {})}
    call = json.dumps({"name": "python", "arguments": {"code": code}})
    turn = asyncio.run(Tools(["python"], **options).step(f"<tool_call>{call}</tool_call>"))
    assert isinstance(turn.observation, list)
    return turn.observation[0]["content"]


@pytest.mark.parametrize(
    ("code", "read"),
    [
        ("1 + 1", "2\n"),
        ("print('é' * 2)\nNone", "éé\n"),
        ("from __future__ import annotations\nclass A:\n    x: B = 1\nA().x", "1\n"),
        ("import sys\nprint('e', file=sys.stderr)\nsys.exit(0)", "e\n"),
        ("print('''a\\n\"\"\"{b}''')", 'a\n"""{b}\n'),
        ("import multiprocessing as m\ndef f(x): return -x\nwith m.Pool(1) as p: print(p.map(f, [2]))", "[-2]\n"),
        ("1 +", '  File "<python>", line 1\n    1 +\n       ^\nSyntaxError: invalid syntax\n'),
        ("print(1)\nimport os; os._exit(0)", "error: python: it came to no end: it left, or met a limit\n1\n"),
        ("ast", "Traceback (most recent call last):\n  File \"<python>\", line 1, in <module>\n    ast\n"
                "NameError: name 'ast' is not defined\n"),
        ("", ""),
    ],
)  # fmt: skip
def test_a_program_gives_what_a_notebook_would_show(code: str, read: str) -> None:
    assert run(code) == read


def test_it_is_bounded_in_time_memory_and_output_and_has_no_network() -> None:
    late = run("print('begun', flush=True)\nwhile True: pass", seconds=0.7)
    assert late == "error: python: it took longer than 0.7 s\nbegun\n"
    assert "MemoryError" in run("b'a' * (500 << 20)", memory_mb=300)
    assert run("print('é' * 10**6)", longest=5) == "é" * 5
    assert run("print('é' * 10**4 + 'an end')", longest=7, cut="start").endswith("left out]\nan end\n")
    assert "unreachable" in run("import socket\nsocket.create_connection(('1.1.1.1', 53), 1)")


def test_nothing_is_remembered_and_wrong_calls_are_told() -> None:
    assert run("x = 1\nx") == "1\n" and "NameError" in run("x")
    assert run("\ud83d").startswith("error: python raised UnicodeEncodeError")
    turn = asyncio.run(Tools(["python"]).step('<tool_call>{"name": "python", "arguments": {}}</tool_call>'))
    assert "code: Missing required argument" in str(turn.observation)


def test_one_turn_does_not_take_it_from_everybody() -> None:
    def turn(code: str) -> str:
        return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"

    async def play() -> tuple[Any, Any]:
        options: dict[str, Any] = {"calls": 2, "python": {"seconds": 1, "at_once": 1}}
        hog, other = Tools(["python"], **options), Tools(["python"], **options)
        hogs = asyncio.create_task(hog.step(turn("while True: pass") * 3))
        await asyncio.sleep(0.1)
        read = await other.step(turn("1 + 1"))
        assert not hogs.done()
        return read.observation, (await hogs).observation

    read, late = asyncio.run(play())
    assert read == [{"role": "tool", "content": "2\n"}]
    said = [each["content"] for each in late]
    assert said == ["error: python: it took longer than 1 s\n"] * 2 + ["error: at most 2 calls in a turn"]
