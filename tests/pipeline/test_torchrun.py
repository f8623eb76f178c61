"""Ranks are the command that started them, whatever folder they are started in, and leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from penstock.pipeline.run import torchrun

sys.argv = ["penstock", "algorithms"]
sys.exit(torchrun.launch(2, 5))
"""


def test_files_of_the_users_own_stand_in_for_no_library(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise SystemExit('the file of the user was imported')")
    (scratch := tmp_path / "scratch").mkdir()
    command, env = [sys.executable, "-P", "-c", PROGRAM], os.environ | {"TMPDIR": str(scratch)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("dr_grpo") >= 2, done.stderr
    assert not list(scratch.iterdir())
