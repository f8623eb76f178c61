"""Ranks are the command that started them, whatever the folder is that they are started in."""

from __future__ import annotations

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
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.count("dr_grpo") >= 2, done.stderr
