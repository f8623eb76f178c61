"""The ready tool ``python``: the policy's programs, run where they can do little harm."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from penstock.services.environments.mcp_server import ToolUnavailable
from penstock.services.environments.tools_config import PythonConfig
from penstock.services.runtime import allowance
from penstock.services.user_processes.sandbox.run import OUTPUT_BYTES, Outcome, SandboxError, run

_CELL = """
def _run_cell(names, code):
    import ast, linecache, sys, traceback
    sys.stdout.reconfigure(line_buffering=True)
    sys.stderr = sys.stdout
    linecache.cache["<python>"] = (len(code), None, code.splitlines(True), "<python>")
    try:
        cell = ast.parse(code, "<python>")
        last = cell.body.pop() if cell.body and isinstance(cell.body[-1], ast.Expr) else None
        exec(compile(cell, "<python>", "exec"), names)
        if last:
            sys.displayhook(eval(compile(ast.Expression(last.value), "<python>", "eval"), names))
    except Exception as error:
        inside = error.__traceback__.tb_next
        while inside and inside.tb_frame.f_code.co_filename != "<python>":
            inside = inside.tb_next
        traceback.print_exception(type(error), error, inside)
_run_cell(globals(), {code!r})
"""
"""Runs ``code`` as a notebook's cell: what it prints, the value of its last line, or what it raised. By lines, so that
what was printed before an end by force is there."""


def python_tool(limits: PythonConfig, longest: int | None) -> Callable[[str], Awaitable[str]]:
    """The tool; ``longest``: characters of a result that are wanted, from its begin on; None: a MiB. Raises
    `SandboxError` where this machine cannot confine a program."""
    executor = ThreadPoolExecutor(limits.at_once or allowance.cores(), thread_name_prefix="python")

    def program(code: str) -> Outcome:
        return run(
            _CELL.format(code=code), seconds=limits.seconds, memory_mb=limits.memory_mb, network=limits.network,
            output_bytes=OUTPUT_BYTES if longest is None else 4 * longest + 4,  # a character has up to 4 bytes
        )  # fmt: skip

    async def python(code: str) -> str:
        """Runs a Python 3 program and returns what it prints, and the value of its last line. Nothing is remembered
        from one call to the next."""
        code.encode()  # half of a surrogate pair: the policy is told
        try:
            outcome = await asyncio.get_running_loop().run_in_executor(executor, program, code)
        except SandboxError as error:
            raise ToolUnavailable(f"python: {error}") from error
        if outcome.completed:
            return outcome.output
        said = (
            f"it took longer than {limits.seconds:g} s"
            if outcome.timed_out
            else "it came to no end: it left, or met a limit"
        )
        return f"error: python: {said}\n{outcome.output}"

    if not program("1").completed:
        raise SandboxError(f"the program 1 does not run within {limits.seconds:g} s and {limits.memory_mb} MiB")
    return python
