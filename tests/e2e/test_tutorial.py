"""docs/tutorial.md, block by block, as somebody who has nothing but that page would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT

PAGE = ROOT / "docs" / "tutorial.md"
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?( fails)?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
SAID = {
    "head -2 train.jsonl": '{"question": "turn ',
    "--dry-run prompts.train.prompt_key=questoin": "prompts.train.prompt_key: no column 'questoin'",
    "penstock run task.yaml run.name=first": '"outcome": "complete"',
    "python try_it.py": "dab",
    "penstock plan $CLONE": "take the first: ",
    "penstock run --resume runs/first": "changed: trainer.steps: 100 → 120",
}
"""What some of the commands must have printed."""


@pytest.mark.chaos
@pytest.mark.timeout(1500)
def test_every_block_works_in_an_empty_folder(tmp_path: Path) -> None:
    env = {**os.environ, "CLONE": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    heard = ""
    for kind, title, fails, text in _BLOCK.findall(PAGE.read_text()):
        if title:
            (tmp_path / title).write_text(text)
        elif kind == "sh":
            done = subprocess.run(
                ["bash", "-e", "-c", text], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600
            )
            said = done.stdout + done.stderr
            assert (done.returncode == 2) if fails else (done.returncode == 0), f"{text}\n{said}"
            for command, words in SAID.items():
                if command in text:
                    assert words in said, f"{text}\n{said}"
                    heard += command
    assert all(command in heard for command in SAID)
    assert (tmp_path / "compare.html").stat().st_size > 100_000
