"""Programs that pass tests: the answer's Python is run in a sandbox, once for each test."""

import re
from typing import Any

from penstock.services.reward.sandbox.run import run

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def code_tests(
    response: str,
    truth: Any,
    seconds: float = 5.0,
    memory_mb: int = 1024,
    network: bool = False,
    partial: bool = False,
) -> float:
    """1.0 where the program passes all tests, else 0.0; with ``partial`` the share that it passes.

    The program is the last ```` ```python ```` block of ``response``, or all of it. ``truth`` says what is tested:
    assertions, as text or a list of texts, each run behind the program (MBPP, HumanEval); or a map of ``inputs`` and
    ``outputs``, texts that it is given on stdin and must print, white space at line ends aside (APPS, TACO). Each test
    has ``seconds`` of CPU and of time, ``memory_mb`` MiB, and no network.
    """
    blocks = _BLOCK.findall(response)
    program = blocks[-1] if blocks else response
    limits: dict[str, Any] = {"seconds": seconds, "memory_mb": memory_mb, "network": network}
    passed = 0
    cases = _cases(truth)
    for tests, stdin, wanted in cases:
        outcome = run(program, tests, stdin, **limits)
        good = outcome.completed and (wanted is None or _lines(outcome.output) == _lines(wanted))
        if not good and not partial:
            return 0.0
        passed += good
    return passed / len(cases)


def _cases(truth: Any) -> list[tuple[str, str, str | None]]:
    """Assertions, stdin, and what is to be printed."""
    if isinstance(truth, str):
        truth = [truth]
    if isinstance(truth, list) and truth and all(isinstance(test, str) for test in truth):
        return [(test, "", None) for test in truth]
    if isinstance(truth, dict) and {"inputs", "outputs"} <= truth.keys():
        inputs, outputs = truth["inputs"], truth["outputs"]
        if inputs and len(inputs) == len(outputs):
            return [("", str(given), str(wanted)) for given, wanted in zip(inputs, outputs, strict=True)]
    raise ValueError(
        "the truth is neither assertions (text, or a list of texts) nor a map of as many inputs as outputs: "
        f"{str(truth)[:80]!r}"
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
