"""Programs that pass tests, in a sandbox elsewhere: a server with SandboxFusion's API (ByteDance, arXiv:2412.00535)."""

import asyncio
import json
import secrets
from typing import Any
from weakref import WeakKeyDictionary

from penstock.services.reward.program_tests import PYTHON, Case, cases_of, program_of, same
from penstock.services.runtime.asking import AskingError, ask

MARKS: dict[str, tuple[str, ...]] = {
    "python": PYTHON, "cpp": ("cpp", "c++"), "nodejs": ("javascript", "js", "nodejs", "node"), "go": ("go", "golang"),
    "csharp": ("csharp", "cs", "c#"), "typescript": ("typescript", "ts"), "bash": ("bash", "sh", "shell"),
    "rust": ("rust", "rs"), "ruby": ("ruby", "rb"), "kotlin_script": ("kotlin", "kts"),
}  # fmt: skip
"""What blocks of a language are marked as, where that is more than its name."""
AT_ONCE = 64
_RUN = """
import builtins, sys, types
names, out = {{}}, sys.stdout
exec({built_in!r}, {{}}, names)
for name, value in names.items():
    vars(builtins).setdefault(name, value)
sys.modules["__main__"] = main = types.ModuleType("__main__")
exec(compile({program!r}, "program", "exec"), vars(main))
exec({tests!r}, vars(main))
out.write("\\n" + {end!r} + "\\n")
"""
"""The program in a ``__main__`` of its own, its tests, and a word that no program knows: it has not ended before."""
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, int], asyncio.Semaphore]] = WeakKeyDictionary()


async def sandbox_tests(
    response: str,
    truth: Any,
    url: str,
    language: str = "python",
    seconds: float = 5.0,
    compile_seconds: float = 30.0,
    memory_mb: int = 1024,
    partial: bool = False,
    tolerance: float = 0.0,
    attempts: int = 6,
    at_once: int = AT_ONCE,
) -> float:
    """As `code_tests.code_tests`, but that the program is run by the server at ``url``, e.g. ``http://sandbox:8080``:
    none of it runs here. Tests run side by side, ``at_once`` of all answers', with ``partial`` False too.

    ``language`` is SandboxFusion's name of the answer's: of others than ``python`` the program is the last block that
    is marked so, and tests are inputs on stdin and what is to be printed. A test has ``seconds``, a compiler
    ``compile_seconds``. A server that is busy or broken is asked again, up to ``attempts`` times.

    Raises `ValueError` where the truth says no tests, and `AskingError` where the server runs nothing: then the answer
    has no reward.
    """
    program, cases = program_of(response, MARKS.get(language, (language.lower(),))), cases_of(truth)
    if language != "python" and any(case.wanted is None for case in cases):
        raise ValueError(f"tests of {language} are inputs and outputs; these are Python: {str(truth)[:80]!r}")
    limits = {
        "language": language, "run_timeout": seconds, "compile_timeout": compile_seconds, "memory_limit_MB": memory_mb,
        "files": {}, "fetch_files": [],
    }  # fmt: skip
    place = f"{url.rstrip('/')}/run_code"
    slots = _slots.setdefault(asyncio.get_running_loop(), {}).setdefault((url, at_once), asyncio.Semaphore(at_once))
    passes = [
        asyncio.ensure_future(_passes(program, case, place, limits, tolerance, attempts, slots)) for case in cases
    ]
    try:
        if partial:
            return sum(await asyncio.gather(*passes)) / len(cases)
        for done in asyncio.as_completed(passes):
            if not await done:
                return 0.0
        return 1.0
    finally:
        for each in passes:
            each.cancel()
        await asyncio.gather(*passes, return_exceptions=True)


async def _passes(
    program: str, case: Case, url: str, limits: dict[str, Any], tolerance: float, attempts: int,
    slots: asyncio.Semaphore,
) -> bool:  # fmt: skip
    end = secrets.token_hex(16) if case.tests else ""
    code = _RUN.format(built_in=case.built_in, program=program, tests=case.tests, end=end) if end else program
    async with slots:
        answer = await ask(url, limits | {"code": code, "stdin": case.stdin}, attempts, {})
    try:
        said = answer.json()
        status, ran = said["status"], said.get("run_result") or {}
        printed = str(ran.get("stdout") or "")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise AskingError(f"{url}: its answer is none of SandboxFusion's: {answer.text[:120]!r}") from None
    if status not in ("Success", "Failed"):
        raise AskingError(f"{url}: it has run nothing: {status}: {json.dumps(said.get('message'))[:120]}")
    if status == "Failed" or ran.get("status") != "Finished" or ran.get("return_code") not in (0, None):
        return False
    if end:
        return end in printed.splitlines()
    return case.wanted is None or same(printed, case.wanted, tolerance)
