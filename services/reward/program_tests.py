"""What an answer's program is, and what its tests are: read out of the answer, and of a task's truth."""

from __future__ import annotations

import ast
import functools
import json
import math
import re
import sys
import textwrap
from typing import Any, NamedTuple

PYTHON = ("python", "py", "python3")
"""What blocks of Python are marked as."""
_CALLED = """
import json as _json, sys as _sys
_sys.set_int_max_str_digits(0)
_given, _wanted = _json.loads({given!r}), _json.loads({wanted!r})
_found = ({name} if {name!r} in globals() else Solution().{name})(*_given)
_found = _json.loads(_json.dumps(_found))
assert _found == _wanted or [_found] == _wanted
"""
"""A test of a function, as APPS judges: a tuple is a list, and what it returns may be wrapped in another one there."""
_USUAL = """
from bisect import *
from typing import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
"""
"""What an answer to a task with ``fn_name`` finds where such tasks come from, and need not import."""


_DECIMAL = re.compile(r"[+-]?(?:\d{1,300}\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?")


class Case(NamedTuple):
    """One run of the program."""

    tests: str = ""
    """Assertions."""
    stdin: str = ""
    wanted: str | None = None
    """What is to be printed."""
    built_in: str = ""
    """Code that defines what the program need not."""


@functools.cache
def _fence(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Begins a block: of any kind at a line's start or a list's point, behind words where it is marked so."""
    marked = "|".join(map(re.escape, marks))
    return re.compile(rf"(?:[\s*+-]*(?:\d+[.)]\s*)?|[^`]*(?=`{{3,}}(?:{marked})\s*$))(`{{3,}})([^`]*)", re.IGNORECASE)


def program_of(response: str, marks: tuple[str, ...] = PYTHON) -> str:
    """The last block of ``response`` that is marked as one of ``marks``, else the last without a mark, else all."""
    blocks: dict[bool, list[str]] = {True: [], False: []}
    fence, label, inside = "", "", list[str]()

    def close() -> None:
        words = re.findall(r"[\w+#]+", label)
        if not label or (words and words[0] in marks):
            blocks[bool(label)].append(textwrap.dedent("\n".join(inside)))

    for line in response.replace("\r\n", "\n").split("\n"):
        if not fence:
            if opening := _fence(marks).fullmatch(line):
                fence, label, inside = opening[1], opening[2].strip().lower(), []
        elif line.lstrip().startswith(fence) or line.rstrip().endswith(fence):
            inside.append(line.partition(fence)[0] if line.lstrip().startswith(fence) else line.rstrip()[: -len(fence)])
            close()
            fence = ""
        else:
            inside.append(line)
    if fence and any(inside) and not (blocks[True] or blocks[False]):  # behind a whole one it is a fence too many
        close()
    found = blocks[True] or blocks[False]
    return found[-1] if found else response


def _parsed(given: Any) -> Any:
    """What is written as the JSON text of a map or a list."""
    if not isinstance(given, str) or given.lstrip()[:1] not in ("{", "["):
        return given
    try:
        return json.loads(given)
    except ValueError:
        raise ValueError(f"the truth begins as JSON, and is none: {given[:80]!r}") from None


def cases_of(truth: Any) -> list[Case]:
    """The tests that ``truth`` says, as `code_tests.code_tests` reads it. Raises `ValueError`."""
    sys.set_int_max_str_digits(0)  # TACO has larger ones
    match given := _parsed(truth):
        case str():
            return [Case(_asserting(given))]
        case [str(), *others] if all(isinstance(test, str) for test in others):
            return [Case(_asserting(test)) for test in given]
        case {"test": str(test), "entry_point": str(name)}:
            return [Case(_asserting(test, name))]
        case {"inputs": [_, *_] as inputs, "outputs": list(outputs)} if len(inputs) == len(outputs):
            pairs = zip(inputs, outputs, strict=True)
            if name := given.get("fn_name"):
                return [Case(_called(name, *pair), built_in=_USUAL) for pair in pairs]
            return [Case("", _text(stdin), _text(wanted)) for stdin, wanted in pairs]
        case [{"input": _, "output": _}, *others] if all(_is_one(test) for test in others):
            return [_of_map(test) for test in given]
        case {"public_test_cases": tests, **row}:
            match _parsed(tests):
                case [{"input": _, "output": _}, *others] as shown if all(_is_one(test) for test in others):
                    about = row.get("metadata")
                    return [_of_map({**test, "metadata": test.get("metadata") or about}) for test in shown]
    raise ValueError(
        "the truth is neither assertions (text, or a list of texts), nor a map of test and entry_point, nor one of as "
        "many inputs as outputs, nor a list of maps of input and output, nor a row with public_test_cases: "
        f"{str(truth)[:80]!r}"
    )


def _is_one(test: Any) -> bool:
    return isinstance(test, dict) and {"input", "output"} <= test.keys()


def _of_map(test: dict[str, Any]) -> Case:
    """One that says itself what kind of test it is."""
    given, wanted = test["input"], test["output"]
    match test.get("testtype") or test.get("type") or "stdin":
        case "stdin" | "stdin_stdout":
            return Case("", _text(given), _text(wanted))
        case "function_call":
            return Case(_called(test.get("fn_name"), given, wanted), built_in=_USUAL)
        case "functional":
            try:
                arguments = [json.loads(line) for line in _text(given).splitlines() if line.strip()]
                result = json.loads(wanted) if isinstance(wanted, str) else wanted
            except ValueError:
                raise ValueError(
                    f"an argument or a result of a functional test is no JSON: {str(test)[:80]!r}"
                ) from None
            about = _parsed(test.get("metadata"))
            name = (about.get("func_name") if isinstance(about, dict) else None) or test.get("fn_name")
            return Case(_called(name, arguments, result), built_in=_USUAL)
        case kind:
            raise ValueError(
                f"a test of the type {kind!r}; there are stdin, stdin_stdout, functional and function_call"
            )


def _asserting(test: str, name: str = "") -> str:
    """The test, with a call of its ``check`` for the function ``name`` where it has none. Raises `ValueError` where it
    would pass whatever the program is."""
    done = _done_by(test)
    if name.isidentifier() and re.search(r"^def check\(", test, re.MULTILINE):
        return test if any(_calls_check(node) for node in done) else f"{test}\ncheck({name})\n"
    if any(isinstance(node, ast.Assert | ast.Call | ast.Raise) for node in done):
        return test
    raise ValueError(
        "a test asserts nothing and calls nothing; where it defines check(), the truth is a map of test and "
        f"entry_point: {test[:80]!r}"
    )


def _done_by(test: str) -> list[ast.AST]:
    """What it does by itself, and does not only define."""
    try:
        body = ast.parse(test).body
    except SyntaxError as error:
        raise ValueError(f"a test is no Python ({error}): {test[:80]!r}") from None
    still = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
    return [node for part in body if not isinstance(part, still) for node in ast.walk(part)]


def _calls_check(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "check"


def _called(name: Any, arguments: Any, wanted: Any) -> str:
    if not isinstance(name, str) or not name.isidentifier() or not isinstance(arguments, list):
        raise ValueError(
            "with fn_name (or func_name, in metadata) each input is a list of the function's arguments: "
            f"{str(name)[:40]!r} with {str(arguments)[:80]!r}"
        )
    return _CALLED.format(name=name, given=json.dumps(arguments), wanted=json.dumps(wanted))


def _text(case: Any) -> str:
    """Of an input or an output: a text, or a list of its lines; a number is its text."""
    if isinstance(case, str):
        return case
    if type(case) in (int, float):
        return str(case)
    if isinstance(case, list) and all(isinstance(line, str) for line in case):
        return "\n".join(case)
    raise ValueError(f"an input or output is neither text nor a list of lines: {str(case)[:80]!r}")


def same(printed: str, wanted: str, tolerance: float) -> bool:
    """What is ``printed`` is what is ``wanted``: line by line; with a ``tolerance`` word by word in each."""
    found, right = ([line.rstrip() for line in text.strip().splitlines()] for text in (printed, wanted))
    if found == right or not tolerance or len(found) != len(right):
        return found == right
    words = ((line.split(), other.split()) for line, other in zip(found, right, strict=True))
    return all(len(a) == len(b) and all(map(functools.partial(_close, tolerance), a, b)) for a, b in words)


def _whole(word: str) -> bool:
    return word.lstrip("+-").isdigit()


def _close(tolerance: float, word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    if not (_DECIMAL.fullmatch(word) and _DECIMAL.fullmatch(wanted)) or (_whole(word) and _whole(wanted)):
        return False
    found, right = float(word), float(wanted)
    relative = 0.0 if _whole(wanted) else tolerance  # a count that is off by one is wrong, however large
    return math.isfinite(found) and math.isclose(found, right, rel_tol=relative, abs_tol=min(tolerance, 0.5))
