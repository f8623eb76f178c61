"""What becomes of a process whose log cannot be written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, resource, sys
from pathlib import Path
import structlog
from penstock.services.runtime import logs

logs.configure("a-run", "trainer", Path(sys.argv[1]), aloud=True)
log = structlog.get_logger()
log.info("before")
os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (Path(sys.argv[1]).stat().st_size, hard))  # as a full disk does
for number in range(3):
    log.info("meanwhile", text="x" * 10_000)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
log.info("after")
print("still working")
"""


def test_a_full_disk_costs_lines_of_the_log_and_not_the_process(tmp_path: Path) -> None:
    file = tmp_path / "actor.log"
    command = [sys.executable, "-c", PROGRAM, str(file)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.stdout == "still working\n", done.stderr
    text = file.read_text()
    assert json.loads(text.splitlines()[0])["event"] == "before"
    assert "may be lacking" in text
    assert json.loads(text.splitlines()[-1])["event"] == "after", "and it goes on when there is room again"
