"""Why vLLM did not start: its processes say so where they write, and what reaches us says only that they did."""

from __future__ import annotations

import os
import re
import stat

ERROR = re.compile(r"(?:^|\] )((?:\w+\.)*\w*(?:Error|Exception): .+)$", re.MULTILINE)
"""An exception's last line: of a traceback, or of one in vLLM's log."""
BESIDE_IT = ("Engine core initialization failed", "WorkerProc initialization failed", "Worker failed with error")
"""What vLLM raises of it elsewhere."""
LONGEST = 1_000


class Said:
    """What this process and its children write from now on, where it goes to files."""

    def __init__(self) -> None:
        self._begun = {fd: os.fstat(fd).st_size for fd in (1, 2) if stat.S_ISREG(os.fstat(fd).st_mode)}

    def cause(self) -> str:
        """The last error that is vLLM's own; empty where none was written, or it went to a terminal."""
        found: list[str] = []
        for fd, begun in self._begun.items():
            with open(f"/proc/self/fd/{fd}", errors="replace") as file:  # noqa: PTH123 - the name may be gone
                file.seek(begun)
                found += ERROR.findall(file.read())
        first_hand = [said for said in found if not any(other in said for other in BESIDE_IT)]
        return (first_hand or found or [""])[-1][:LONGEST]
