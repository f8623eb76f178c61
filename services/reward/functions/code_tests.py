"""Programs that pass tests: the answer's Python is run in a sandbox, once for each test."""

from typing import Any

from penstock.services.reward.program_tests import cases_of, program_of, same
from penstock.services.user_processes.sandbox.run import OUTPUT_BYTES, run


def code_tests(
    response: str,
    truth: Any,
    seconds: float = 5.0,
    memory_mb: int = 1024,
    network: bool = False,
    partial: bool = False,
    tolerance: float = 0.0,
) -> float:
    """1.0 where the program passes all tests, else 0.0; with ``partial`` the share that it passes.

    The program is the last block of ``response`` that is marked as Python, else the last without a mark, else all of
    it. ``truth`` says what is tested, itself or as JSON text:

    - assertions, as text or a list of texts, each run behind the program (MBPP);
    - a map of ``test``, assertions, and ``entry_point``, the function that their ``check`` is called with (HumanEval);
    - a map of ``inputs`` and ``outputs``, each a text or a list of lines, which the program is given on stdin and must
      print, white space at line ends aside (APPS, TACO);
    - the same with ``fn_name``: that function, or method of the class ``Solution``, is called with each input, a list
      of its arguments, and must return the output (APPS, TACO). It need not import what such tasks take for granted:
      ``List`` and all of typing, collections, itertools, functools, heapq, bisect and math;
    - a list of maps of ``input`` and ``output``, each read by its ``testtype`` or ``type``: ``stdin`` or
      ``stdin_stdout``, which nothing means too, ``functional`` with ``func_name`` in its ``metadata`` (an argument in
      each line, as JSON), or ``function_call`` with ``fn_name`` (LiveCodeBench, DeepCoder);
    - a row with such a list as ``public_test_cases``, and ``metadata`` for all of it (LiveCodeBench, its whole row).

    With a ``tolerance`` numbers that are printed may differ from those that are wanted by so much, or by that share of
    them: 0.50 is 0.5. Whole numbers may not.

    Raises `ValueError` where it is none of these, or where a test would pass whatever the program is. Each test has
    ``seconds`` of CPU and of time, ``memory_mb`` MiB a process, and no network.
    """
    program = program_of(response)
    limits: dict[str, Any] = {"seconds": seconds, "memory_mb": memory_mb, "network": network}
    passed = 0
    cases = cases_of(truth)
    for case in cases:
        most = OUTPUT_BYTES + 4 * len(case.wanted or "")  # a character has up to 4 bytes
        outcome = run(program, case.tests, case.stdin, built_in=case.built_in, output_bytes=most, **limits)
        good = outcome.completed and (case.wanted is None or same(outcome.output, case.wanted, tolerance))
        if not good and not partial:
            return 0.0
        passed += good
    return passed / len(cases)
