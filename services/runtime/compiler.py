"""Whether this machine can compile what vLLM and torch's kernels for GPUs are made of when they are first used."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path


def lacks_compiler() -> str | None:
    """What Triton, which compiles a module of Python's in C before its first kernel, would not find here, and what to
    do; None where all is there."""
    lacking = []
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        lacking.append("no C compiler (gcc, clang, or what CC names)")
    if not (header := Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        lacking.append(f"no {header}")
    return f"is {' and '.join(lacking)}; run: apt install gcc python3-dev" if lacking else None
